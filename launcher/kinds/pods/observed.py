"""The scheduler's pod tells observers in it how to reach the scheduler: ``kubectl exec POD -- kvstore-status``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.curve_keys import pair
from kvstore.job.directory import make_private, temporary_root
from kvstore.job.observing_place import FILE, ObservingPlace
from kvstore.job.settings import OBSERVER_KEY


def observers_variables(env: Mapping[str, str], root: Path | None = None) -> dict[str, str]:
    """Write the file for observers into a private directory; return what the scheduler must know of them.

    The key is made here, and known to this pod alone. If the file cannot be written, as where nothing is writable, the
    job runs without observers.

    Args:
        env: the environment of the scheduler, whose process this one becomes.
        root: where to make the directory; by default where temporary files are.
    """
    try:
        config = Config.from_env(env)
        public, secret = ("", "") if config.keys is None else pair()
        place = ObservingPlace(
            *(config.root, secret, config.transport),
            job=config.job,
            launcher="pod",
            pid=os.getpid(),
            started=time.time(),
            workers=config.num_workers,
            servers=config.num_servers,
        )
        place.write(make_private(root or temporary_root()) / FILE, durable=False)
    except (ConfigError, OSError):  # the scheduler itself says what is wrong with its settings
        return {}
    return {OBSERVER_KEY.name: public} if public else {}
