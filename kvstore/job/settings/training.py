"""Settings: training, output, checkpoints and observing."""

from __future__ import annotations

from kvstore.job.settings.setting import Setting
from kvstore.job.valid_values import (
    ClassReference,
    ClassReferences,
    Flag,
    Integer,
    Interval,
    Intervals,
    OneOf,
    RoundWindow,
    RoundWindows,
    Text,
)

# ---- training
UPDATE_ON_KVSTORE = Setting(
    "MXNET_UPDATE_ON_KVSTORE",
    Flag(),
    True,
    "whether `Trainer` updates on the servers by default; 0 updates in the workers",
)
OMP_NUM_THREADS = Setting(
    "OMP_NUM_THREADS",
    Integer(1),
    0,
    "how many threads torch uses; `launch.py` sets it where you do not",
    shown="the host's cores ÷ its processes of the same role; 1 for aggregators",
)
OMP_WAIT_POLICY = Setting(
    "OMP_WAIT_POLICY",
    OneOf(("passive", "active")),
    "passive",
    "whether torch's threads sleep while they wait, or spin and keep their core; `launch.py` sets it where you do not, "
    "and servers do so themselves. Workers' threads spin for some 25 us first (`GOMP_SPINCOUNT=1000`)",
)
VERBOSE = Setting(
    "KVSTORE_VERBOSE",
    Flag(),
    False,
    "whether every process of a job that fails prints its whole traceback at once (`launch.py --verbose`)",
)
OPTIMIZERS: Setting[tuple[ClassReference, ...]] = Setting(
    "KVSTORE_OPTIMIZERS",
    ClassReferences(),
    (),
    "other optimizers that a process may import and use, each under a name; servers and workers need the same",
    shown="none",
)
NO_COLOR = Setting("NO_COLOR", Text("any text"), "", "keeps colors out of `launch.py`'s output")
COLUMNS = Setting(
    "KVSTORE_COLUMNS",
    Integer(0),
    0,
    "how wide the terminal is on which `launch.py` shows this process's progress bar; 0 for none; `launch.py` sets it",
)

# ---- checkpoints
CHECKPOINT_DIR = Setting(
    "KVSTORE_CHECKPOINT_DIR",
    Text("a directory that all hosts of the job share"),
    "",
    "where checkpoints of the job go; without it there are none (`--checkpoint-dir`)",
)
CHECKPOINT_EVERY = Setting(
    "KVSTORE_CHECKPOINT_EVERY",
    Intervals(),
    Interval(),
    "how often there is a checkpoint, beside those that the program asks for (`--checkpoint-every`)",
)
CHECKPOINT_KEEP = Setting(
    "KVSTORE_CHECKPOINT_KEEP", Integer(1), 3, "how many checkpoints are kept, the newest ones (`--checkpoint-keep`)"
)
CHECKPOINT_RESUME = Setting(
    "KVSTORE_CHECKPOINT_RESUME",
    Text("a checkpoint, or a directory of checkpoints"),
    "",
    "the checkpoint that the job continues from; of a directory, the newest. A directory without one begins anew "
    "(`--resume`)",
)

# ---- observing
TRACE_FILE = Setting("KVSTORE_TRACE_FILE", Text("a file"), "", "where an observer writes the job's trace")
OBSERVE = Setting(
    "KVSTORE_OBSERVE",
    Text(
        "what `kvstore-status` takes: the number of the process that has started the job, its name, or its place file"
    ),
    "",
    "the job that an observer looks at (`DMLC_ROLE=observer python -m servers`)",
    shown="this user's only one on this host",
)
DASHBOARD_PORT = Setting(
    "KVSTORE_DASHBOARD_PORT", Integer(0, 65535), 0, "the port of an observer's page; 0 takes a free one"
)
DASHBOARD_TOKEN_FILE = Setting(
    "KVSTORE_DASHBOARD_TOKEN_FILE",
    Text("a file that only you can read"),
    "",
    "the token of the page, so that it is the same for many jobs; the file is made if it is not there "
    "(`--dashboard-token-file`)",
    shown="a new token for each job",
)
DASHBOARD_TOKEN = Setting(
    "KVSTORE_DASHBOARD_TOKEN", Text("32 to 128 letters, digits, - and _"), "", "the token itself, from `launch.py`"
)
DASHBOARD_FD = Setting(
    "KVSTORE_DASHBOARD_FD", Integer(-1), -1, "a listening socket that the observer inherits; -1 for none"
)
LIFELINE = Setting(
    "KVSTORE_LIFELINE", Flag(), False, "whether an observer ends when its standard input does; `launch.py` sets it"
)
TRACE: Setting[RoundWindow] = Setting(
    "KVSTORE_TRACE",
    RoundWindows(),
    RoundWindow(),
    "which rounds members note for the job's trace; `launch.py --trace` sets it",
    shown="none",
)
