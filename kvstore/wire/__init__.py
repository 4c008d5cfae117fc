"""The messages between processes, and how they become bytes. Pure: no sockets, no clock, no torch.

A module uses a message as ``wire.Push``, after ``from kvstore import wire``. The names are listed here, because
``import *`` would bring ``dataclasses.fields`` in place of the module ``wire.fields``.

members      members and the scheduler: joining, heartbeats, keys, barriers, leaving; which process serves a rank
arrays       workers, aggregators and servers: values, gradients, optimizers, states, borrowed device memory
rows         workers and servers: rows of tables, by their ids
records      a server and its standby: changes of the server's state, and the whole of it
guests       readers and observers, which take no part in training; the reports of members
checkpoints  checkpoints of a running job
tracing      the job's trace: what members noted, in chunks
versions     publishing: the versions that readers follow
message      what messages have in common: nodes, senders, requests, replies
coding       messages and arrays to frames of bytes and back
fields       the check of each field
"""
# mypy: implicit-reexport

from kvstore.wire.arrays import (
    Admit,
    Borrowed,
    Close,
    DropState,
    GetStates,
    Init,
    KeepState,
    Lend,
    Open,
    OptimizerStates,
    PassRounds,
    Pause,
    Pull,
    Push,
    PushLent,
    PutStates,
    Resume,
    SetOptimizer,
    StatePart,
    TakeState,
    Values,
)
from kvstore.wire.checkpoints import AwaitCapture, Capture, Captured
from kvstore.wire.coding import (
    VERSION,
    Buffer,
    decode,
    encode,
    forget_shared,
    frame_groups,
    pack_arrays,
    require_short,
    unpack_arrays,
)
from kvstore.wire.fields import MAX_PRIORITY, MAX_STORES, CodecDescription
from kvstore.wire.guests import (
    Connect,
    Connected,
    FindKeys,
    KeysFound,
    KeysListed,
    ListKeys,
    Locate,
    Located,
    Observe,
    Observed,
    ReadRows,
    ReadValues,
    RowsRead,
    ServerReport,
    Stacks,
    ValuesRead,
    Where,
    WorkerReport,
)
from kvstore.wire.members import (
    GIVEN_UP,
    Admitted,
    Alive,
    AwaitWorkers,
    Barrier,
    Beat,
    Census,
    CloseStore,
    Counted,
    Deadlock,
    Declare,
    Describe,
    Enter,
    Entered,
    Fault,
    GoOn,
    Here,
    JobFailed,
    Join,
    Leave,
    Lost,
    Moved,
    Newcomer,
    OpenStore,
    Placed,
    ProcessAlive,
    Ready,
    Retire,
    Roster,
    ShareTaken,
    Standing,
    StillStuck,
    Stop,
    StoreOpened,
    Stuck,
    TakeShare,
    View,
    Welcome,
)
from kvstore.wire.message import (
    MAX_REASON,
    Ack,
    Explain,
    Explanation,
    Failure,
    Message,
    Node,
    Reply,
    Request,
    Sender,
)
from kvstore.wire.records import (
    BucketState,
    ClosedRounds,
    ClosedRowRounds,
    EncodedAnswer,
    EncoderState,
    Grouped,
    InDoubt,
    LedgerPage,
    OptimizerCalls,
    ReadBy,
    Record,
    StatesState,
    Stored,
    StoreState,
    StripeState,
    TablePage,
    TableRest,
    Updated,
)
from kvstore.wire.rows import (
    DescribeTable,
    EvictRows,
    FreezeTable,
    Frozen,
    FrozenPage,
    InitTables,
    PullRows,
    PushRows,
    PutRows,
    PutTableRest,
    ReadFrozen,
    Rows,
    TableCounts,
    Thaw,
)
from kvstore.wire.tracing import FetchTrace, TraceChunk, TraceFetched
from kvstore.wire.versions import (
    Publish,
    PublishedState,
    PublishNoted,
    ReadTable,
    ReadVersion,
    TableRead,
    VersionMade,
    VersionRead,
    VersionState,
)
