"""A process that opens what another one has lent. It is asked in lines of JSON, and answers in such lines.

["open", name, [device, opaque, offset, nbytes]]  in hexadecimal; answers with "", or why it cannot
["read", name]                                    answers with the bytes, in hexadecimal
["sum", [names], dtype]                           answers with the bytes of the sum, in hexadecimal
["lend", nbytes, number]                          lends memory full of a number; answers with its handle, as above
["close", name]                                   answers with ""
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from kvstore.devices import CannotLend, Handle, device_memory
from kvstore.values import sum_in_order


def main(kind: str) -> None:
    memory = device_memory(kind)
    opened: dict[str, torch.Tensor] = {}

    def answer(what: str, *of: Any) -> str:
        if what == "open":
            name, (device, opaque, offset, nbytes) = of
            try:
                opened[name] = memory.open(Handle(bytes.fromhex(device), bytes.fromhex(opaque), offset, nbytes))
            except CannotLend as exc:
                return str(exc)
        elif what == "read":
            return bytes(opened[of[0]].cpu().tolist()).hex()
        elif what == "sum":
            total = sum_in_order([opened[name].view(getattr(torch, of[1])) for name in of[0]])
            return bytes(total.cpu().view(torch.uint8).tolist()).hex()
        elif what == "lend":
            nbytes, number = of
            device = torch.device("cpu" if kind == "host" else "cuda:0")
            lent = memory.lend(nbytes, device)
            memory.fill(lent.memory, [torch.full((nbytes,), number, dtype=torch.uint8, device=device)])()
            opened[f"lent {len(opened)}"] = lent.memory
            return json.dumps([lent.handle.device.hex(), lent.handle.opaque.hex(), *lent.handle[2:]])
        else:
            del opened[of[0]]
        return ""

    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
