"""'local' and 'device': values are summed and updated in this process, on the CPU or on their own devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvstore.errors import AlreadyInitialized, NotFinite, UsageError
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import finite
from kvstore.optim.optimizer import describe, log_replaced, require_shapes
from kvstore.optim.updater import Updater, refusals
from kvstore.spec import Key, Spec, require_floats, require_same, without_value
from kvstore.store.base import KVStore
from kvstore.store.registry import flag, require_options
from kvstore.store.statistics import Statistics
from kvstore.ticket import Ticket
from kvstore.values import all_finite, as_output, as_tensors, reduce_to, spec_of

CPU = torch.device("cpu")


class LocalStore(KVStore):
    """Sums and updates on the CPU, whatever devices the values are on."""

    def __init__(self, name: str = "local", check_finite: bool = False) -> None:
        super().__init__(name)
        self._check_finite = check_finite
        self._pushed: dict[Key, int] = {}  # pushes by key, counted where values are checked
        self._stored: dict[Key, torch.Tensor] = {}
        self._specs: dict[Key, Spec] = {}
        self._updater: Updater | None = None
        self._function: Callable[[Key, Any, Any], None] | None = None
        self._pushes = self._pulls = 0
        self._closed = False

    @classmethod
    def create(cls, name: str, _canonical: str, options: Mapping[str, Any]) -> KVStore:
        """Make one for ``kvstore.create``."""
        require_options(name, options, ("check_finite",))
        return cls(name, flag("check_finite", options.get("check_finite")))

    def _init(self, values: dict[Key, list[Any]], listed: list[Key]) -> None:
        self._check()
        if len(values) < len(listed):
            raise UsageError("a key is listed twice: pass each key to init once")
        firsts = {key: as_tensors(arrays)[0] for key, arrays in values.items()}
        if self._updater is not None:
            require_shapes(self._updater.optimizer, ((key, spec_of(first)) for key, first in firsts.items()))
        for key in firsts:
            if key in self._stored:
                raise AlreadyInitialized(f"key {key!r} is already initialized; push a new value instead")
        for key, first in firsts.items():
            self._stored[key] = first.to(self._home(key, [first]), copy=True).contiguous()
            self._specs[key] = spec_of(first)

    def _push(self, values: dict[Key, list[Any]], priority: int) -> Ticket:
        given = {key: self._checked(key, as_tensors(arrays)) for key, arrays in values.items()}
        if self._updater is not None:
            require_floats((key, self._specs[key]) for key in given)
        merged = {key: self._reduce(key, tensors) for key, tensors in given.items()}
        if self._check_finite:
            self._require_finite(merged)
        self._pushes += len(merged)
        if self._updater is not None:
            # The gradient is overwritten, so one that still is the caller's memory is copied first.
            fresh = {k: m.clone() if m.data_ptr() == given[k][0].data_ptr() else m for k, m in merged.items()}
            self._updater.update([(key, self._stored[key], grad) for key, grad in fresh.items()])
        elif self._function is not None:
            for key, total in merged.items():
                self._function(key, total, self._stored[key])
        else:
            for key, total in merged.items():
                self._stored[key].copy_(total)
        return Ticket("push", list(values))

    def _pull(self, outs: dict[Key, list[Any]], priority: int, copy: bool = True) -> Ticket:
        targets = {key: self._checked(key, [as_output(out) for out in arrays]) for key, arrays in outs.items()}
        self._pulls += len(targets)
        for key, tensors in targets.items():
            for tensor in tensors:
                tensor.copy_(self._stored[key])
        return Ticket("pull", list(outs))

    def _pushpull(self, values: dict[Key, list[Any]], outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        for key, arrays in outs.items():
            self._checked(key, [as_output(out) for out in arrays])
        self._push(values, priority)
        return self._pull(outs, priority)

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """See ``KVStore``."""
        self._check()
        new = describe(optimizer, hyperparameters)
        require_shapes(new, self._specs.items())
        old = self._updater.optimizer if self._updater is not None else None
        with refusals(new):
            if self._updater is not None and new.same_rule(old):
                self._updater.configure(new)
            else:
                self._updater = Updater(new)
                log_replaced(old, new)
        self._function = None

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        """See ``KVStore``."""
        self._check()
        self._function, self._updater = updater, None

    @property
    def learning_rate(self) -> float:
        """See ``KVStore``."""
        return self._require_updater().lr

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        """See ``KVStore``."""
        updater = self._require_updater()
        updater.changes = {**updater.changes, **updater.optimizer.changes(others, groups)}
        if learning_rate is not None:
            updater.lr = finite("learning_rate", learning_rate)
        if rescale_grad is not None:
            updater.rescale_grad = finite("rescale_grad", rescale_grad)

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        """See ``KVStore``."""
        updater = self._require_updater()
        states_file.write(path, updater.optimizer.rule, updater.states.of(self._stored), note=note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        updater = self._require_updater()
        optimizer, loaded = states_file.read(path)
        states_file.require_optimizer(optimizer, updater.optimizer.rule, path)
        states_file.require_keys(loaded, self._specs, path)
        updater.states.load(loaded, self._stored)

    def companion(self) -> KVStore:
        """See ``KVStore``."""
        return type(self)(self._name)

    @property
    def check_finite(self) -> bool:
        """See ``KVStore``."""
        return self._check_finite

    def statistics(self) -> Statistics:
        """See ``KVStore``."""
        return Statistics(keys=len(self._stored), pushes=self._pushes, pulls=self._pulls)

    def close(self) -> None:
        """See ``KVStore``."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise UsageError("this store is closed")

    def _home(self, key: Key, tensors: list[torch.Tensor]) -> torch.device:
        """Where the sum of ``tensors`` is made, and the value of ``key`` kept."""
        return CPU

    def _reduce(self, key: Key, tensors: list[torch.Tensor]) -> torch.Tensor:
        home = self._home(key, tensors)
        if self._stored[key].device != home:
            self._stored[key] = self._stored[key].to(home)
        return reduce_to(tensors, home)

    def _require_finite(self, sums: Mapping[Key, torch.Tensor]) -> None:
        for key, total in sums.items():
            self._pushed[key] = self._pushed.get(key, 0) + 1
            if total.is_floating_point() and not all_finite(total):
                raise NotFinite(
                    f"push {self._pushed[key]} of {key!r} has NaN or infinite elements; no value has been updated"
                )

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._check()
        spec = self._specs.get(key)
        if spec is None:
            raise without_value(key, self._specs)
        for tensor in tensors:
            require_same(key, spec, spec_of(tensor), "this call has")
        return tensors

    def _require_updater(self) -> Updater:
        self._check()
        if self._updater is None:
            raise UsageError("no optimizer is set; call set_optimizer first")
        return self._updater


class DeviceStore(LocalStore):
    """Sums and updates on the devices where the values live; keys are spread over them by bytes."""

    def __init__(self, name: str = "device", check_finite: bool = False) -> None:
        super().__init__(name, check_finite)
        self._homes: dict[Key, torch.device] = {}
        self._loads: dict[torch.device, int] = {}

    def _home(self, key: Key, tensors: list[torch.Tensor]) -> torch.device:
        """The device of the first value, or the least loaded of several; a key moves there at its first push."""
        devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        home = self._homes.get(key)
        if home not in devices:
            home = min(devices, key=lambda device: self._loads.get(device, 0))
            if key in self._stored:  # init's device says nothing about where gradients will be
                self._homes[key] = home
                self._loads[home] = self._loads.get(home, 0) + self._specs[key].nbytes
        return home
