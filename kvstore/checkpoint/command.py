"""``kvstore-checkpoint``: list, verify and export the checkpoints of jobs; MXNet's files as safetensors, and back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.checkpoint.checkpoint_reader import verify
from kvstore.checkpoint.exported import export
from kvstore.checkpoint.folders import found, listed
from kvstore.checkpoint.manifest import load_manifest
from kvstore.checkpoint.mxnet_conversion import export_mxnet, import_mxnet
from kvstore.errors import CheckpointError, KVStoreError

PARAMS = ".params"  # the suffix of MXNet's files of arrays


def main(args: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(args)
    try:
        if given.command == "list":
            _list(given.directory)
        elif given.command == "verify":
            _verify(given.path)
        elif given.command == "import":
            out = given.out or given.path.with_suffix(".safetensors")
            print(f"{out}: {import_mxnet(given.path, out)} arrays from {given.path}")
        elif given.out.suffix == PARAMS:
            print(f"{given.out}: {_export_mxnet(given)} arrays from {given.path}")
        else:
            folder = _one(given.path)
            record = export(folder, given.out, given.store, given.states)
            print(f"{given.out}: {_size(record.nbytes)} from {folder}, sha256 {record.sha256}")
    except (KVStoreError, OSError) as exc:
        print(f"kvstore-checkpoint: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore-checkpoint",
        description="List, verify and export the checkpoints that jobs have written; read and write MXNet's .params.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|export|import")
    command = commands.add_parser("list", help="list the checkpoints in a directory")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("verify", help="compare all files with their sha256")
    command.add_argument("path", type=Path, help="a checkpoint, or a directory whose checkpoints are all verified")
    command = commands.add_parser("export", help="write one plain file: arrays by name")
    command.add_argument(
        "path", type=Path, help="a checkpoint; a directory, for its newest one; or a safetensors file, for MXNet"
    )
    command.add_argument("out", type=Path, help="the file to write: safetensors, or NAME.params for MXNet")
    command.add_argument("--store", type=int, default=0, help="which of the job's stores (default: 0)")
    command.add_argument("--states", action="store_true", help="also the optimizer's states, as NAME.STATE")
    command = commands.add_parser("import", help="write a file of MXNet's arrays as safetensors; needs no MXNet")
    command.add_argument("path", type=Path, help="MXNet's file, such as model-0001.params")
    command.add_argument("out", type=Path, nargs="?", help="the file to write (default: PATH as .safetensors)")
    return parser


def _export_mxnet(given: argparse.Namespace) -> int:
    if given.path.is_file():
        return export_mxnet(given.path, given.out)
    with TemporaryDirectory(dir=given.out.parent, prefix=".") as directory:  # where there is room for the file, too
        plain = Path(directory) / "plain.safetensors"
        export(_one(given.path), plain, given.store, given.states)
        return export_mxnet(plain, given.out)


def _list(directory: Path) -> None:
    folders = listed(directory)
    if not folders:
        raise _nothing(directory)
    damaged = 0
    for folder in folders:
        if not folder.whole:
            print(f"{folder.path.name}  unfinished")
            continue
        try:
            manifest = load_manifest(folder.path)
        except CheckpointError as exc:
            print(f"{folder.path.name}  damaged: {exc}")
            damaged += 1
            continue
        optimizers = ", ".join(store.optimizer or "none" for store in manifest.stores)
        print(
            f"{folder.path.name}  {manifest.rounds} rounds  {_size(manifest.nbytes)}  {manifest.written}  "
            f"{manifest.num_workers} workers, {manifest.num_servers} servers  optimizer: {optimizers}"
        )
    if damaged:
        raise CheckpointError(f"{directory}: {damaged} of {len(folders)} are damaged")


def _verify(path: Path) -> None:
    folders = [folder.path for folder in listed(path) if folder.whole] or [_one(path)]
    errors = []
    for folder in folders:
        try:
            manifest = verify(folder)
        except CheckpointError as exc:
            errors.append(exc)
            print(f"{folder}: DAMAGED")
        else:
            print(f"{folder}: whole, {len(manifest.files)} files, {_size(manifest.nbytes)}")
    if errors:
        raise errors[0] if len(errors) == 1 else CheckpointError("\n".join(map(str, errors)))


def _one(path: Path) -> Path:
    folder = found(path)
    if folder is None:
        raise _nothing(path)
    return folder


def _nothing(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: no checkpoint there")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


if __name__ == "__main__":
    sys.exit(main())
