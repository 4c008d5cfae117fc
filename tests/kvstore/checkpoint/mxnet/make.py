"""How the files here were made: ``python make.py``, with mxnet==1.9.1 and numpy<1.24 from PyPI, on Python 3.11."""

from pathlib import Path

import mxnet as mx
import numpy as np

HERE = Path(__file__).parent
TYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")


def save(name, arrays):
    mx.nd.save(str(HERE / f"{name}.params"), arrays)


def grid(dtype):
    return mx.nd.array(np.arange(6).reshape(2, 3), dtype=dtype)


bfloat16 = np.array([0x3F80, 0xC000], np.uint16).view([("bfloat16", np.uint16)])  # 1 and -2
save("dtypes", {name: grid(name) for name in TYPES} | {"bfloat16": mx.nd.array(bfloat16, dtype=bfloat16.dtype)})

rows = np.arange(8, dtype=np.float16).reshape(2, 2, 2)
sparse = {
    "arg:rows": mx.nd.sparse.row_sparse_array((rows, [1, 4]), shape=(6, 2, 2), dtype="float16"),
    "arg:line": mx.nd.sparse.row_sparse_array((np.array([5.0, 7.0]), [0, 3]), shape=(4,), dtype="float64"),
    "arg:none": mx.nd.sparse.zeros("row_sparse", (6, 3)),
    "aux:csr": mx.nd.sparse.csr_matrix(([1.0, 2.0, 3.0], [2, 0, 1], [0, 2, 2, 3]), shape=(3, 4)),
}
mx.nd.waitall()
save("sparse", sparse)

# MXNet notes the shape of the values before it waits for them: this file says that there are none, if it is made again
# until it does.
dense = mx.nd.array(np.arange(60_000).reshape(300, 200) % 3000 == 0)
save("unwaited", {"csr": dense.tostype("csr")})

save("list", [mx.nd.ones(2), mx.nd.zeros((1, 1))])
save("number", {"number": mx.nd.array(3.5), "after": mx.nd.ones(2)})  # which MXNet cannot load
with mx.util.np_shape(True):
    save("numpy", {"number": mx.nd.array(3.5), "empty": mx.nd.zeros((0, 3)), "after": mx.nd.ones(2)})

net = mx.gluon.nn.HybridSequential(prefix="net_")
net.add(mx.gluon.nn.Dense(2, in_units=3), mx.gluon.nn.BatchNorm(in_channels=2))
net.initialize(mx.init.One())
net.hybridize()
net(mx.nd.ones((1, 3)))
net.export(str(HERE / "symbol"), 1)
(HERE / "symbol-symbol.json").unlink()
net.save_parameters(str(HERE / "gluon.params"))

weight, grad = mx.nd.ones((2, 3)), mx.nd.array(np.arange(6).reshape(2, 3))
for name, options, dump in (("sgd", {"momentum": 0.5}, False), ("adam", {}, True), ("sgd", {}, False)):
    updater = mx.optimizer.get_updater(mx.optimizer.create(name, learning_rate=1.0, **options))
    updater(3, grad, weight)
    file = f"{name}.states" if options or dump else "none.states"
    (HERE / file).write_bytes(updater.get_states(dump_optimizer=dump))
