from __future__ import annotations

import pytest
import torch
from cifar import resnet
from cifar.devices import DeviceError, find_devices
from cifar.replicas import Replicas, statistics
from torch import nn

CPU = torch.device("cpu")


class Alone:
    """A reducer for one worker."""

    def average(self, tensors):
        pass


def batch(count=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % 10


@pytest.mark.parametrize(
    ("network", "layers", "count"),
    [
        ("resnet", 8, 75_290),
        ("resnet", 20, 269_722),
        ("resnet", 32, 464_154),
        ("resnet", 44, 658_586),
        ("resnet", 56, 853_018),
        ("resnet", 110, 1_727_962),
        ("resnet18", 8, 11_173_962),
        ("resnet18-d2l", 8, 11_176_970),
    ],
)
def test_the_networks_have_as_many_parameters_as_published(network, layers, count):
    model = resnet.build(network, layers)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    assert len(convolutions) + 1 == (18 if network.startswith("resnet18") else layers)


@pytest.mark.parametrize("network", resnet.NETWORKS)
def test_ten_scores_for_a_picture_and_a_gradient_for_every_parameter(network):
    model = resnet.build(network, 8)
    scores = model(batch(2)[0])
    assert scores.shape == (2, 10)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_more_classes_and_other_shapes():
    assert resnet.build("resnet", 8, 100)(torch.zeros(2, 3, 28, 20)).shape == (2, 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_computes_in_another_dtype_and_keeps_its_own(dtype):
    torch.manual_seed(0)
    model = resnet.build("resnet", 8, dtype=dtype).eval()
    inside = []
    model[0].register_forward_hook(lambda module, x, y: inside.append(y.dtype))
    scores = model(batch(2)[0])
    scores.sum().backward()
    assert (inside, scores.dtype) == ([dtype], torch.float32)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    model.dtype = torch.float32
    assert torch.allclose(model(batch(2)[0]), scores, rtol=0.1, atol=0.1)


def test_stages_halve_the_picture():
    shapes = []
    model = resnet.build("resnet", 8)
    for module in model:
        if isinstance(module, resnet.Residual):
            module.register_forward_hook(lambda module, x, y: shapes.append(tuple(y.shape[1:])))
    model(batch(2)[0])
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_he_initialisation():
    torch.manual_seed(0)
    for module in resnet.build("resnet", 20).modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.std().item() == pytest.approx((2 / (9 * module.out_channels)) ** 0.5, rel=0.15)


def test_the_same_seed_gives_the_same_network():
    def weights():
        torch.manual_seed(3)
        return nn.utils.parameters_to_vector(resnet.build("resnet", 8).parameters())

    assert weights().equal(weights())


@pytest.mark.parametrize("layers", [2, 9, 18])
def test_other_depths_are_refused(layers):
    with pytest.raises(ValueError, match=rf"6n \+ 2 layers.* not {layers}"):
        resnet.build("resnet", layers)


def test_other_networks_are_refused():
    with pytest.raises(ValueError, match="no network 'vgg'; choose from resnet, resnet18"):
        resnet.build("vgg", 8)


def test_replicas_share_a_batch():
    """The mean of two halves' gradients is the gradient of the whole, where no statistics differ."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    one, two = Replicas(model, [CPU]), Replicas(model, [CPU, CPU])
    assert one.backward(*batch()) == two.backward(*batch())
    (whole,) = one.models
    for parameter, *halves in zip(whole.parameters(), *(half.parameters() for half in two.models), strict=True):
        assert torch.allclose(parameter.grad, (halves[0].grad + halves[1].grad) / 2, atol=1e-6)


def test_gradients_do_not_pile_up():
    replicas = Replicas(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), [CPU])
    replicas.backward(*batch())
    first = [parameter.grad.clone() for parameter in replicas.models[0].parameters()]
    replicas.backward(*batch())
    assert all(a.equal(b.grad) for a, b in zip(first, replicas.models[0].parameters(), strict=True))


def test_statistics_are_averaged_over_devices_and_then_over_workers():
    class Doubling:
        def average(self, tensors):
            for tensor in tensors.values():
                tensor.mul_(2)

    replicas = Replicas(nn.BatchNorm1d(2), [CPU, CPU])
    for mean, model in zip((1.0, 3.0), replicas.models, strict=True):
        model.running_mean.fill_(mean)
    replicas.average_statistics(Doubling())
    assert [model.running_mean.tolist() for model in replicas.models] == [[4.0, 4.0]] * 2
    assert set(statistics(replicas.models[0])) == {"running_mean", "running_var"}


def test_validation_counts_and_leaves_the_statistics_alone():
    replicas = Replicas(resnet.build("resnet", 8), [CPU])
    before = {name: tensor.clone() for name, tensor in statistics(replicas.models[0]).items()}
    pictures, _ = batch()
    guesses = replicas.models[0].eval()(pictures).argmax(1)
    counts = replicas.validate([(pictures, guesses), (pictures, (guesses + 1) % 10)])
    assert counts == {"right": 8.0, "count": 16.0}
    assert all(tensor.equal(before[name]) for name, tensor in statistics(replicas.models[0]).items())


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"--gpus 0,1: .* sees no CUDA device; without --gpus the CPU is used"):
        find_devices([0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"--gpus 2: .* only CUDA devices 0 to 1"):
        find_devices([1, 2])
    assert find_devices([0, 1]) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert find_devices(None) == find_devices([]) == [CPU]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_replica_on_a_gpu_learns_as_one_on_the_cpu():
    torch.manual_seed(0)
    model = resnet.build("resnet", 8)
    cpu, gpu = Replicas(model, [CPU]), Replicas(model, find_devices([0]))
    cpu.backward(*batch())
    gpu.backward(*batch())
    for a, b in zip(cpu.models[0].parameters(), gpu.models[0].parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad.cpu(), atol=1e-2)
    gpu.average_statistics(Alone())
    assert gpu.validate([batch()])["count"] == 8
