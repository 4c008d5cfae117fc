"""Pictures in memory, and the loaders of them."""

from __future__ import annotations

import colorsys
import hashlib
import io
import socket
import tarfile
import threading
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, product
from types import SimpleNamespace

import pytest
import torch
from cifar import cifar10, digits, download, options
from cifar.augment import normalize, random_crop, random_mirror, random_resized_crop
from cifar.batches import part, seeded
from cifar.distort import affine, recolor
from cifar.download import FOLDER, Source, UnavailableError, find_or_fetch
from cifar.images import DataError
from cifar.loaders import changed, synthetic, train_loader, validation_loader
from small_cifar10 import batch_file

# ---- pictures in memory


def test_labels_stay_with_the_pictures_that_are_chosen(dataset):
    some = dataset.train[10:13]
    assert len(some) == 3
    assert some.pixels[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert some.labels.tolist() == [0, 1, 2]
    assert dataset.train[torch.tensor([51, 3])].labels.tolist() == [1, 3]


# ---- Random changes to batches of pictures


def pictures(count=6):
    return torch.randint(1, 256, (count, 3, 32, 32), generator=seeded(1), dtype=torch.uint8)


def test_a_crop_is_a_window_of_the_padded_picture():
    originals = pictures()
    crops = random_crop(originals, seeded(0))
    assert crops.shape == originals.shape
    assert crops.dtype == originals.dtype
    padded = torch.nn.functional.pad(originals, (4, 4, 4, 4))
    for crop, picture in zip(crops, padded, strict=True):
        windows = [picture[:, top : top + 32, left : left + 32] for top, left in product(range(9), repeat=2)]
        assert sum(crop.equal(window) for window in windows) == 1


def test_crops_reach_every_corner():
    picture = pictures(1).expand(2000, -1, -1, -1)
    crops = random_crop(picture, seeded(0))
    assert len({crop.numpy().tobytes() for crop in crops}) == 81


def test_about_half_are_mirrored_and_the_rest_untouched():
    originals = pictures(200)
    mirrored = random_mirror(originals, seeded(0))
    flipped = [new.equal(old.flip(2)) for new, old in zip(mirrored, originals, strict=True)]
    kept = [new.equal(old) for new, old in zip(mirrored, originals, strict=True)]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert 60 < sum(flipped) < 140


def test_the_same_seed_gives_the_same_changes():
    assert random_crop(pictures(), seeded(1, 2)).equal(random_crop(pictures(), seeded(1, 2)))
    assert not random_crop(pictures(), seeded(1, 2)).equal(random_crop(pictures(), seeded(2, 1)))


def test_normalized_pictures_have_mean_0_and_deviation_1():
    originals = pictures()
    scaled = originals.float() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3))
    result = normalize(originals, mean.tolist(), std.tolist())
    assert result.dtype == torch.float32
    assert torch.allclose(result.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(result.std((0, 2, 3)), torch.ones(3), atol=1e-5)


def test_a_resized_crop_is_a_part_of_the_picture_made_as_large():
    row = torch.arange(0, 256, 8, dtype=torch.uint8)
    pictures = row.expand(200, 3, 32, 32).contiguous()
    crops = random_resized_crop(pictures, seeded(0))
    assert crops.shape == pictures.shape
    assert crops.dtype == torch.uint8
    assert ((crops.int() - crops[:, :1, :1].int()).abs() <= 1).all()  # rows stay rows
    spans = (crops[:, 0, 0, -1].int() - crops[:, 0, 0, 0].int()) / 248
    assert 0.75 < spans.min() < 0.85  # a side of at least 0.8, of which the outer half pixels are cut
    assert spans.max() > 0.95
    assert len(set(crops[:, 0, 0, 0].tolist())) > 20  # from everywhere


def pictures_of_distort(count=4):
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=seeded(1))


def test_nothing_asked_for_changes_nothing():
    assert affine(pictures_of_distort(), None).equal(pictures_of_distort())
    assert (recolor(pictures_of_distort(), None).int() - pictures_of_distort().int()).abs().max() <= 1


@pytest.mark.parametrize("amount", [{"hue": 36}, {"saturation": 50}, {"lightness": 50}])
def test_colours_move_as_colorsys_says(amount, monkeypatch):
    """All random numbers are 1, so that every picture moves by the whole amount."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    by = amount.get("hue", 0) / 180, amount.get("lightness", 0) / 255, amount.get("saturation", 0) / 255
    colors = pictures_of_distort(1)[:, :, :4, :4]
    shown = recolor(colors, None, **amount)
    for before, after in zip(colors.flatten(2)[0].T.tolist(), shown.flatten(2)[0].T.tolist(), strict=True):
        h, l, s = colorsys.rgb_to_hls(*(value / 255 for value in before))  # noqa: E741
        wanted = colorsys.hls_to_rgb((h + by[0]) % 1, min(1, l + by[1]), min(1, s + by[2]))
        assert after == pytest.approx([255 * value for value in wanted], abs=1)


def test_a_quarter_turn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    turned = affine(pictures_of_distort(), None, angle=90)
    either = [pictures_of_distort().rot90(times, (2, 3)) for times in (1, -1)]
    assert any((turned.int() - each.int()).abs().max() <= 1 for each in either)


def test_twice_the_size_shows_the_middle():
    corner = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    corner[:, :, 8:24, 8:24] = 200
    assert (affine(corner, None, scale=(2, 2)) > 0).float().mean() > 0.95
    assert (affine(corner, None, scale=(0.5, 0.5)) > 100).float().mean() == pytest.approx(1 / 16, abs=0.01)


def test_a_wider_aspect_is_as_much_lower(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    square = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    square[:, :, 8:24, 8:24] = 200
    shown = affine(square, None, aspect=0.25)[0, 0] > 100
    high, wide = shown.any(1).sum(), shown.any(0).sum()
    assert {int(high), int(wide)} == {14, 18}


# ---- each worker's share of the pictures, and the digits


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_workers_share_the_pictures_and_no_two_read_the_same(dataset, workers):
    parts = [part(dataset.train, rank, workers).pixels[:, 0, 0, 0].tolist() for rank in range(workers)]
    assert sorted(chain(*parts)) == list(range(103))


@pytest.fixture(scope="module")
def images():
    return digits.read_dataset()


def test_the_digits_have_the_form_of_cifar10(images):
    for subset in (images.train, images.validation):
        assert subset.pixels.shape[1:] == (3, 32, 32)
        assert subset.pixels.dtype == torch.uint8
        assert subset.labels.dtype == torch.int64
    assert images.train.pixels.max() > 250
    assert not images.mirrored


def test_a_fifth_is_kept_for_validation_and_never_trained_on(images):
    assert len(images.train) + len(images.validation) == 1797
    assert len(images.validation) == 360
    trained = {picture.numpy().tobytes() for picture in images.train.pixels}
    assert not any(picture.numpy().tobytes() in trained for picture in images.validation.pixels)


def test_both_parts_hold_every_class_alike(images):
    train, validation = images.train.labels.bincount(), images.validation.labels.bincount()
    assert len(train) == len(validation) == 10
    assert torch.allclose(validation / (train + validation), torch.tensor(0.2), atol=0.01)


def test_the_split_is_always_the_same(images):
    again = digits.read_dataset()
    assert again.validation.pixels.equal(images.validation.pixels)


def test_the_mean_and_deviation_are_those_of_the_pictures(images):
    pixels = images.train.pixels.float() / 255
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(images.mean), atol=0.002)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(images.std), atol=0.002)


# ---- loaders: what a worker trains on and validates with, as the options say


PLAIN = options.parse(
    ["--batch-size", "10", "--random-crop", "0", "--random-mirror", "0", "--last-batch", "keep", "--kv-store", "local"]
)


def place(rank, workers):
    return SimpleNamespace(rank=rank, num_workers=workers)


def numbers(loader):
    """Which of the numbered pictures the loader shows, in its order."""
    return [int(number) for batch, _ in loader for number in batch[:, 0, 0, 0]]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_in_each_epoch_each_picture_is_shown_once(dataset, workers):
    loaders = [train_loader(dataset, PLAIN, place(rank, workers)) for rank in range(workers)]
    orders = []
    for epoch in range(2):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        orders.append([number for loader in loaders for number in numbers(loader)])
        assert sorted(orders[-1]) == list(range(103))
    assert orders[0] != orders[1]


def test_whole_batches_alone_by_default(dataset):
    loader = train_loader(dataset, Namespace(**{**vars(PLAIN), "last_batch": "discard"}), place(0, 2))
    assert [len(labels) for _, labels in loader] == [10] * 5


def test_labels_stay_with_their_pictures(dataset):
    args = Namespace(**{**vars(PLAIN), "random_crop": "1", "random_mirror": 1})
    for batch, labels in train_loader(dataset, args, place(1, 2)):
        assert (batch[:, 0, 16, 16].long() % 10).equal(
            labels
        )  # the middle of a picture is its number, whatever the crop


def test_only_what_may_be_is_mirrored(dataset):
    pixels = torch.arange(32, dtype=torch.uint8).expand(50, 3, 32, 32).contiguous()
    args = Namespace(**{**vars(PLAIN), "random_mirror": 1, "batch_size": 50})
    for mirrored in (True, False):
        shown = replace(dataset, train=replace(dataset.train, pixels=pixels, labels=torch.zeros(50)), mirrored=mirrored)
        ((batch, _),) = train_loader(shown, args, place(0, 1))
        assert {int(first) for first in batch[:, 0, 0, 0]} == ({0, 31} if mirrored else {0})


def test_together_the_workers_validate_every_picture_once_and_unchanged(dataset):
    args = Namespace(**{**vars(PLAIN), "random_crop": "1"})
    shown = [number for rank in range(3) for number in numbers(validation_loader(dataset, args, place(rank, 3)))]
    assert sorted(shown) == list(range(31))


def test_a_loader_of_a_batch_beyond_a_workers_share_is_an_error(dataset):
    args = Namespace(**{**vars(PLAIN), "batch_size": 52})
    with pytest.raises(DataError, match="--batch-size 52 is more than a worker's share of numbers: 51 of 103"):
        train_loader(dataset, args, place(0, 2))


def test_the_shape_that_the_network_sees(dataset):
    args = Namespace(**{**vars(PLAIN), "image_shape": (3, 28, 30), "random_crop": "1"})
    for loader in (train_loader(dataset, args, place(0, 1)), validation_loader(dataset, args, place(0, 1))):
        assert next(iter(loader))[0].shape == (10, 3, 28, 30)


def test_a_crop_comes_from_anywhere_in_the_margin():
    row = torch.arange(1, 33, dtype=torch.uint8)  # a column's number; the margin is black
    pictures = row.expand(300, 3, 32, 32).contiguous()

    def first_columns(**options):
        return set(changed(pictures, Namespace(**{**vars(PLAIN), **options}), False)[:, 0, 16, 0].tolist())

    assert first_columns(random_crop="1") == {0, 1, 2, 3, 4, 5}
    assert first_columns(random_crop="1", pad_size=0) == {1}
    assert first_columns(random_crop="1", pad_size=2, image_shape=(3, 28, 28)) == {0, *range(1, 8)}
    assert first_columns(random_crop="0", image_shape=(3, 28, 28)) == {3}


@pytest.mark.parametrize(
    "option",
    [
        {"max_random_h": 36},
        {"max_random_s": 50},
        {"max_random_l": 50},
        {"max_random_rotate_angle": 10},
        {"max_random_shear_ratio": 0.1},
        {"max_random_aspect_ratio": 0.25},
        {"max_random_scale": 1.2},
    ],
)
def test_every_option_changes_pictures_and_no_two_alike(option):
    picture = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8, generator=seeded(0))
    shown = changed(picture.expand(2, -1, -1, -1), Namespace(**{**vars(PLAIN), **option}), False)
    assert shown.dtype == torch.uint8
    assert not shown[0].equal(picture[0])
    assert not shown[0].equal(shown[1])


def test_the_mean_of_the_command_line_is_subtracted(dataset):
    mean = tuple(value / 255 for value in options.parse(["--rgb-mean", "10,20,30"]).rgb_mean)
    batch, _ = next(iter(validation_loader(replace(dataset, mean=mean), PLAIN, place(0, 1))))
    assert batch[0, :, 0, 0].tolist() == pytest.approx([-10, -20, -30])


def test_noise_is_another_for_each_worker_and_the_same_in_each_batch():
    args = Namespace(**{**vars(PLAIN), "num_examples": 100, "num_classes": 1000, "image_shape": (3, 24, 40)})
    mine, theirs = (synthetic(args, place(rank, 2)) for rank in range(2))
    assert len(mine) == 5
    assert mine[0][0].shape == (10, 3, 24, 40)
    assert mine[0] is mine[4]
    assert not mine[0][0].equal(theirs[0][0])
    assert mine[0][1].max() > 9


def test_a_record_is_a_label_and_planes_of_red_green_and_blue(tmp_path):
    red, green, blue = (bytes([value]) * 1024 for value in (1, 2, 3))
    (tmp_path / "one.bin").write_bytes(b"\x07" + b"\x09" + red[1:] + green + blue)
    images = cifar10.read_batch(tmp_path / "one.bin")
    assert images.labels.tolist() == [7]
    assert images.labels.dtype == torch.int64
    assert images.pixels.shape == (1, 3, 32, 32)
    assert images.pixels.dtype == torch.uint8
    assert images.pixels[0, :, 0, 0].tolist() == [9, 2, 3]
    assert images.pixels[0, :, 31, 31].tolist() == [1, 2, 3]


def test_rows_come_before_columns(tmp_path):
    plane = bytes(row * 4 for row in range(32) for _ in range(32))
    (tmp_path / "one.bin").write_bytes(b"\x00" + 3 * plane)
    pixels = cifar10.read_batch(tmp_path / "one.bin").pixels
    assert pixels[0, 0, 5].tolist() == [20] * 32


def test_a_file_of_full_size(tmp_path):
    (tmp_path / "full.bin").write_bytes(batch_file(10000))
    assert (tmp_path / "full.bin").stat().st_size == 30_730_000
    assert len(cifar10.read_batch(tmp_path / "full.bin")) == 10000


def test_five_files_to_train_on_and_one_to_validate(cifar10_folder):
    dataset = cifar10.read_dataset(cifar10_folder)
    assert (len(dataset.train), len(dataset.validation)) == (100, 20)
    second = cifar10.read_batch(cifar10_folder / "data_batch_2.bin")
    assert dataset.train.pixels[20:40].equal(second.pixels)
    assert dataset.mirrored


@pytest.mark.parametrize("damage", [b"", b"\x00" * 3072, b"\x00" * 3074])
def test_a_wrong_length_is_an_error_that_names_the_file(cifar10_folder, damage):
    (cifar10_folder / "data_batch_4.bin").write_bytes(damage)
    with pytest.raises(DataError, match=rf"data_batch_4.bin: {len(damage)} bytes are not a whole number"):
        cifar10.read_dataset(cifar10_folder)


def test_a_wrong_label_is_an_error_that_names_the_record(cifar10_folder):
    data = bytearray(batch_file(20))
    data[3073 * 6] = 10
    (cifar10_folder / "test_batch.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"test_batch.bin: record 6 has the label 10"):
        cifar10.read_dataset(cifar10_folder)


def test_a_missing_file_is_an_error_that_names_it(cifar10_folder):
    (cifar10_folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3.bin: cannot be read \(No such file"):
        cifar10.read_dataset(cifar10_folder)


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def make_archive(path, names=cifar10.FILES, extra=()):
    with tarfile.open(path, "w:gz") as tar:
        for name in (*extra, *(f"{FOLDER}/{name}" for name in names)):
            add(tar, name, batch_file(10))
    return hashlib.md5(path.read_bytes()).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves a folder on the loopback interface and counts what it is asked for."""

    def __init__(self, folder):
        self.requests = []
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))

    def source(self, md5, file="small.tar.gz"):
        return Source(f"http://127.0.0.1:{self.server_port}/{file}", md5)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        self.server.requests.append(self.path)

    def do_GET(self):
        time.sleep(0.1)  # long enough for others to come and find the lock taken
        super().do_GET()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "www").mkdir()
    with Server(tmp_path / "www") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def nowhere(file="small.tar.gz") -> Source:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return Source(f"http://127.0.0.1:{port}/{file}", "0" * 32)


def at_once(*calls):
    """What each call returns, or raises, when all are made at the same time."""
    results = []

    def run(call):
        try:
            results.append(call())
        except Exception as exc:
            results.append(exc)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_is_there_is_not_downloaded(cifar10_folder):
    assert find_or_fetch(cifar10_folder.parent, nowhere()) == cifar10_folder
    assert find_or_fetch(cifar10_folder, nowhere()) == cifar10_folder


def test_downloads_checks_and_unpacks(server, tmp_path):
    md5 = make_archive(tmp_path / "www" / "small.tar.gz")
    folder = find_or_fetch(tmp_path / "data", server.source(md5))
    assert len(cifar10.read_dataset(folder).train) == 50
    assert not list(tmp_path.rglob("*.part"))


def test_only_one_of_many_workers_downloads(server, tmp_path):
    source = server.source(make_archive(tmp_path / "www" / "small.tar.gz"))
    folders = at_once(*[lambda: find_or_fetch(tmp_path / "data", source)] * 4)
    assert folders == [tmp_path / "data" / FOLDER] * 4
    assert len(server.requests) == 1


def test_those_who_waited_do_not_try_again_in_vain(server, tmp_path):
    source = server.source("0" * 32, "absent.tar.gz")
    errors = at_once(*[lambda: find_or_fetch(tmp_path / "data", source)] * 4)
    assert all(isinstance(error, UnavailableError) and "404" in str(error) for error in errors)
    assert len(server.requests) < 4
    with pytest.raises(UnavailableError, match="404"):  # but a later run does
        find_or_fetch(tmp_path / "data", source)


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server, tmp_path):
    make_archive(tmp_path / "www" / "small.tar.gz")
    with pytest.raises(UnavailableError, match="not the published 0000"):
        find_or_fetch(tmp_path / "data", server.source("0" * 32))
    assert not list((tmp_path / "data" / FOLDER).iterdir())
    assert not (tmp_path / "data" / "small.tar.gz").exists()


def test_an_archive_that_was_put_there_needs_no_network(tmp_path):
    source = Source(nowhere().url, make_archive(tmp_path / "small.tar.gz"))
    assert len(cifar10.read_dataset(find_or_fetch(tmp_path, source)).validation) == 10


def test_without_network_it_says_what_is_missing_and_why(tmp_path):
    source = nowhere()
    with pytest.raises(UnavailableError, match=rf"not in {tmp_path}, and {source.url} cannot be had: .*refused"):
        find_or_fetch(tmp_path, source)


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "ANSWER_S", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(f"http://127.0.0.1:{silent.getsockname()[1]}/small.tar.gz", "0" * 32)
        with pytest.raises(UnavailableError, match=r"no answer within 0.2 s"):
            find_or_fetch(tmp_path, source)


def test_nothing_but_the_six_files_is_unpacked(server, tmp_path):
    hostile = ("../outside.bin", "/absolute.bin", f"{FOLDER}/../../outside.bin", f"{FOLDER}/other.bin")
    md5 = make_archive(tmp_path / "www" / "small.tar.gz", extra=hostile)
    folder = find_or_fetch(tmp_path / "data", server.source(md5))
    assert {path.name for path in folder.iterdir()} == set(cifar10.FILES)
    assert not list(tmp_path.rglob("outside.bin"))


def test_a_link_in_the_place_of_a_file_is_not_followed(server, tmp_path):
    archive = tmp_path / "www" / "small.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo(f"{FOLDER}/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "../secret"
        tar.addfile(link)
        for name in cifar10.FILES[1:]:
            add(tar, f"{FOLDER}/{name}", batch_file(1))
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    with pytest.raises(UnavailableError, match=r"lacks cifar-10-batches-bin/data_batch_1.bin"):
        find_or_fetch(tmp_path / "data", server.source(md5))


def test_a_file_that_was_lost_is_unpacked_again(tmp_path):
    source = Source(nowhere().url, make_archive(tmp_path / "small.tar.gz"))
    folder = find_or_fetch(tmp_path, source)
    (folder / "test_batch.bin").unlink()
    assert find_or_fetch(tmp_path, source) == folder
    assert (folder / "test_batch.bin").exists()


def test_the_published_sum_is_the_default():
    assert Source().file == "cifar-10-binary.tar.gz"
    assert Source().md5 == "c32a1d4ab5d03f1284b67883e8d13530"
