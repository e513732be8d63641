"""Images on their way to a method: CoOp's transforms to the bit, augmentation on the device, transfer in order."""

import numpy as np
import pytest
import torch
from cuda_tensors import DEVICE, CudaDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_runs import seeded
from toy_shards import toy_source

from shards import loader, pack, reader, source, transfer
from shards.device.loader import device_evaluation_batches
from shards.device.resize import REDUCTION, DeviceResize
from shards.loader import LoaderOptions
from shards.tasks import prefetch
from shards.transforms import EvalTransform, TrainAugment, crop_box, jitter_colours

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def T():
    """Torchvision's transforms; importing them at the top would take a second of every test worker."""
    from torchvision import transforms

    return transforms


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def coop(T, size: int):
    resize = T.Resize(size, T.InterpolationMode.BICUBIC)
    return T.Compose([resize, T.CenterCrop(size), T.ToTensor(), T.Normalize(MEAN, STD)])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([7, 32, 33, 224]))
def test_test_transform_is_that_of_coop_at_any_size(T, width, height, size):
    image = picture(width, height)
    assert torch.equal(EvalTransform(size, MEAN, STD)(image), coop(T, size)(image))


@pytest.mark.parametrize("size", [(64, 48), (20, 200), (200, 20), (8, 8), (1, 1)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.8, 1.0)])
def test_crops_are_those_of_torchvision_for_the_same_draws(T, size, scale):
    image = picture(*size)
    for seed in range(50):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = T.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
        assert crop_box(image.width, image.height, scale, seeded(seed)) == expected


def test_the_whole_augmentation_of_coop_is_torchvisions_for_the_same_draws(T):
    crop = T.RandomResizedCrop(32, (0.08, 1.0), interpolation=T.InterpolationMode.BICUBIC)
    plain = T.Compose([crop, T.RandomHorizontalFlip(), T.ToTensor()])
    augment, image = TrainAugment(32, (0, 0, 0), (1, 1, 1)), picture(70, 53)
    for seed in range(20):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = plain(image)
        assert torch.equal(augment(image, seeded(seed)), expected)


def test_colour_jitter_is_torchvisions_for_the_same_draws(T):
    image = picture(24, 24)
    for seed in range(20):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = T.ColorJitter(0.3, 0.3, 0.3)(image)
        assert np.array_equal(np.asarray(jitter_colours(image, 0.3, seeded(seed))), np.asarray(expected))


def test_rotation_is_torchvisions_for_the_same_angle(T):
    image, angle = picture(40, 30), seeded(5)
    drawn = torch.empty(1).uniform_(-20, 20, generator=angle).item()
    fill = [round(255 * channel) for channel in MEAN]
    turned = T.functional.rotate(image, drawn, T.InterpolationMode.BILINEAR, fill=fill)
    expected = TrainAugment(16, MEAN, STD).augment(turned, angle)
    assert np.array_equal(np.asarray(TrainAugment(16, MEAN, STD, rotation=20).augment(image, seeded(5))), expected)


def test_draws_come_from_the_given_stream_alone():
    augment = TrainAugment(32, MEAN, STD, (0.5, 1.0), colour_jitter=0.2, rotation=10)
    image = picture(40, 60)
    state = torch.random.get_rng_state()
    first = augment(image, seeded(3))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(augment(image, seeded(3)), first) and not torch.equal(augment(image, seeded(4)), first)
    torch.random.set_rng_state(state)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
AUGMENT = TrainAugment(8, MEAN, STD)


# Two images are too large to be resized on the device.
SIZES = [(9, 7), (8, 8), (1, 1), (60, 60), (13, 59), (40, 5), (8, 31), (31, 8), (20, 19), (200, 70), (64, 56)]
COUNT = 23


def noise(width: int, height: int, seed: int, extreme: bool = False) -> np.ndarray:
    """[H, W, 3] uint8; extreme: of 0 and 255 alone, which bicubic weights overshoot."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return (pixels > 127).astype(np.uint8) * 255 if extreme else pixels


def photos(split):
    for i in range(COUNT):
        yield source.ImageRecord(f"{i}.png", i % 5, source.png(noise(*SIZES[i % len(SIZES)], seed=i)))


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> reader.ImageList:
    root = tmp_path_factory.mktemp("photos")
    pack.pack_source(toy_source(photos, counts={"train": COUNT}, per_shard=5), root)
    return reader.open_dataset(root, "toy").open_images("train")


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.cpu(), b.cpu()) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def on_device(transform: EvalTransform, device: str, images: list[np.ndarray]) -> torch.Tensor:
    pixels = [torch.from_numpy(image).to(device) for image in images]
    return DeviceResize(transform, torch.device(device)).make_centres(pixels).cpu()


def by_pillow(transform: EvalTransform, images: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([transform(Image.fromarray(image)) for image in images])


@st.composite
def sized(draw) -> tuple[int, np.ndarray]:
    """An image size, and an image that fits on the device, from 1 pixel to the strongest reduction."""
    size = draw(st.sampled_from([7, 8, 33]))
    length = st.one_of(st.integers(1, int(REDUCTION * size)), st.sampled_from([1, size - 1, size, size + 1, 2 * size]))
    return size, noise(draw(length), draw(length), draw(st.integers(0, 9)), draw(st.booleans()))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(st.lists(sized(), min_size=1, max_size=6))
def test_images_of_any_size_are_those_of_pillow(device, many):
    images, transform = [image for size, image in many if size == many[0][0]], EvalTransform(many[0][0], MEAN, STD)
    assert torch.equal(on_device(transform, device, images), by_pillow(transform, images))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extreme", [False, True])
def test_photographs_seen_by_a_vit_are_those_of_pillow(device, extreme):
    """With images that share a matrix product and others that are too large for that."""
    transform = EvalTransform(224, MEAN, STD)
    sizes = [
        (500, 375),
        (375, 500),
        (224, 224),
        (224, 300),
        (300, 224),
        (1680, 400),
        (400, 1680),
        (64, 64),
        (1100, 900),
    ]
    images = [noise(*size, seed=n, extreme=extreme) for n, size in enumerate(sizes)]
    assert torch.equal(on_device(transform, device, images), by_pillow(transform, images))


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_images_of_any_shape_are_resized_as_by_pillow(device):
    draw = np.random.default_rng(0)
    for size in (8, 33, 224):
        lengths = (1, size // 2, size, size + 1, int(1.2 * size), 2 * size, int(REDUCTION * size))
        shapes = [(w, h) for w in lengths for h in lengths if max(w, h) < 20 * min(w, h) and (size < 224 or h != w)]
        shapes = [shapes[i] for i in draw.permutation(len(shapes))[:12]]
        images, transform = [noise(*shape, seed=n) for n, shape in enumerate(shapes)], EvalTransform(size, MEAN, STD)
        pixels = [torch.from_numpy(image).to(device) for image in images]
        resized = DeviceResize(transform, torch.device(device)).make_centres(pixels)
        assert torch.equal(resized.cpu(), torch.stack([transform(Image.fromarray(image)) for image in images]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_on_the_device_are_those_of_the_host(train, device, workers):
    """Also of images that are too large for the device, and on ranks of which one has a batch of padding."""
    transform = EvalTransform(8, MEAN, STD)
    for rank in range(3):
        share = {"rank": rank, "world_size": 3}
        batches = device_evaluation_batches(train, transform, 4, workers, device=torch.device(device), **share)
        expected = loader.evaluation_batches(train, transform, 4, **share)
        for (images, *facts), (wanted, *wanted_facts) in zip(batches, expected, strict=True):
            real = facts[1] >= 0
            assert same([facts], [wanted_facts]) and torch.equal(images.cpu()[real], wanted[real])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_is_read_once_while_there_is_room_for_its_pixels(train, workers, monkeypatch):
    reads: list[int] = []
    read = reader.ImageList.read
    monkeypatch.setattr(reader.ImageList, "read", lambda split, i: (reads.append(i), read(split, i))[1])
    for cache_bytes, again in ((0, COUNT), (2**30, 0)):
        reads.clear()
        options = LoaderOptions(workers, cache_bytes=cache_bytes)
        ours = loader.TrainLoader(train, COUNT, AUGMENT, 1, options)
        list(ours.batches(0))
        assert len(reads) == COUNT
        list(ours.batches(1))
        list(ours.batches(2))
        assert len(reads) == COUNT + 2 * again


CPU = torch.device("cpu")


def batches(count=5):
    for n in range(count):
        yield torch.full((4, 3, 2, 2), float(n)), torch.arange(4) + n, torch.tensor([n])


class Watched:
    """An iterator that notes how far it was taken and whether it was closed."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken, self.taken, self.closed = count, broken, 0, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self.broken:
            raise OSError("no more of this")
        if self.taken == self.count:
            raise StopIteration
        self.taken += 1
        return (torch.tensor(self.taken),)

    def close(self) -> None:
        self.closed = True


def test_on_a_cpu_the_very_tensors_pass_one_tuple_at_a_time():
    source = list(batches())
    for before, passed in zip(source, transfer.to_device(source, CPU), strict=True):
        assert all(a is b for a, b in zip(before, passed, strict=True))
    watched = Watched(5)
    for n, _ in enumerate(transfer.to_device(watched, CPU), 1):
        assert watched.taken == n


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_prefetching_starts_that_many_items_ahead_and_keeps_their_order(ahead):
    started: list[int] = []
    for n, item in enumerate(prefetch(range(6), lambda item: (started.append(item), item)[1], ahead)):
        assert item == n and started == list(range(min(6, n + 1 + ahead)))
    assert n == 5


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_closes_the_source(ahead):
    watched = Watched(6, broken=4)
    with pytest.raises(OSError, match="no more"):
        list(prefetch(watched, lambda item: item, ahead))
    assert watched.closed


def test_the_images_of_a_batch_go_to_a_gpu_in_one_page_locked_copy(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor)
    images = [torch.full((height, 2, 3), height, dtype=torch.uint8) for height in (1, 4, 2)]
    with CudaDevice():
        moved = transfer.upload_all(images, DEVICE)
        assert all(image.device == DEVICE for image in moved) and pinned == [42]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(moved, images, strict=True))
        assert transfer.upload(moved[0], DEVICE) is moved[0] and pinned == [42]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_on_a_gpu_the_same_values_arrive_while_the_device_is_busy(pinned):
    """Long kernels on the consumer's stream would show memory that is written again too early."""
    device, busy = torch.device("cuda"), torch.randn(2048, 2048, device="cuda")
    draws = torch.Generator().manual_seed(0)
    source = [(torch.randn(64, 3, 64, 64, generator=draws), torch.full((64,), n)) for n in range(40)]
    if pinned:
        source = [(images.pin_memory(), labels) for images, labels in source]
    sums = []
    for n, (images, labels) in enumerate(transfer.to_device(source, device)):
        assert images.is_cuda and torch.equal(labels.cpu(), source[n][1])
        for _ in range(5):
            busy = busy @ busy / 2048
        sums.append(images.double().sum(0))
        del images
    for (images, _), total in zip(source, sums, strict=True):
        assert torch.allclose(images.double().sum(0), total.cpu(), rtol=1e-12, atol=1e-9)


@pytest.mark.gpu
def test_on_a_gpu_batches_may_be_used_on_any_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for given, moved in zip(batches(20), transfer.to_device(batches(20), torch.device("cuda")), strict=True):
            assert torch.cuda.current_stream() == stream
            assert all(torch.equal(a, b.cpu()) for a, b in zip(given, moved, strict=True))
