"""What train.py does with a GPU, in complete runs on the fake GPUs of fake_cuda.py.

During the steps only batches and log rows go between host and device, the host waits for neither,
and nothing reads values on the host. NCCL and the kernels with strict requirements would accept
their operands. The groups are those of make_mesh.
"""

import contextlib
import dataclasses
import io
import os
import shutil
import sys
from collections import Counter
from datetime import timedelta
from unittest import mock

import fake_cuda
import pytest
import torch
from conftest import flags
from core.conftest import Pool

import dist
import train
from model import SIZES, ModelConfig, Transformer, generate

# (strategy and more, ranks, micro-batches of a rank in a step)
CASES = [
    ("single --dtype float32 --n_kv_head 4", 1, 2),
    ("single --optimizer muon --clip adaptive --optim_metrics_interval 2", 1, 1),
    ("single --keep_last 2 --async_save --model tinyllama-1.1b --sample_tokens 2", 1, 1),
    ("single --tp 2 --model tinyllama-1.1b --activation_checkpointing selective", 2, 1),
    ("ddp --grad_sync micro_batch --clip adaptive --optimizer muon", 2, 2),
    ("fsdp --reshard_after_forward false --loss_chunks 2 --clip adaptive", 2, 2),
    ("fsdp --tp 2 --optimizer muon --keep_last 2 --async_save --profile 0:1", 4, 1),
    ("hsdp --dp_shard 2 --grad_sync shard --keep_last 2", 4, 2),
]
BLOCKS = "to cuda, pageable, blocking"
READS = "to cpu, pageable, blocking"
ASKS = "asks for _local_scalar_dense"
# What the host waits for outside the steps, by (function, what)
OUTSIDE = {("optim.py __init__", BLOCKS)}
OUTSIDE |= {("start.py read_val_batches", BLOCKS)}
OUTSIDE |= {("train.py evaluate", BLOCKS), ("train.py evaluate", ASKS)}
SAMPLING = {("model.py generate", BLOCKS), ("model.py generate", READS)}
CHECKPOINTS = {("train.py save", ASKS), ("checkpoint.py fill", BLOCKS)}
SAVING = {("checkpoint.py blocks", READS)}
ASYNC_SAVING = {("async_save.py copy_to_host", "to cpu, pinned, blocking")}


def test_every_stand_in_replaces_a_function_of_torch():
    """A stand-in that torch has renamed would let train.py ask for a real device."""
    assert not [name for name in fake_cuda.STAND_INS if not hasattr(torch.cuda, name)]


def play(argv: list[str]) -> tuple[Counter, list[str]]:
    """Run train.py on this rank; return its crossings and refusals."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    gpu = fake_cuda.Gpu(fakes)
    build, train_step, save = train.build, train.train_step, train.save

    def outside_of_steps(function):
        def call(*arguments, **options):
            with mock.patch.object(gpu, "part", "outside"):
                return function(*arguments, **options)

        return call

    def build_and_free(*arguments, **options):
        with mock.patch.object(torch.cuda, "empty_cache") as empty_cache:
            built = build(*arguments, **options)
        empty_cache.assert_called_once()  # frees the memory of the full tensors
        return built

    def step(*arguments):
        gpu.part = "loop"
        return train_step(*arguments)

    def save_and_wait(state, run, saver):
        save(state, run, saver)
        saver.wait()  # fake tensors are not made for two threads

    names = ("evaluate", "print_sample")
    outside = {name: outside_of_steps(getattr(train, name)) for name in names}
    outside["save"] = outside_of_steps(save_and_wait)
    patches = mock.patch.multiple(train, build=build_and_free, train_step=step, **outside)
    with patches, fakes, gpu, contextlib.redirect_stdout(io.StringIO()):
        assert train.command(argv) == 0
    return gpu.crossings, gpu.refusals


class Gpus(Pool):
    start_method = "spawn"  # a library is preloaded when a process starts

    def __init__(self, library):
        super().__init__()
        self.library = library

    def start(self) -> None:
        preload = {"LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, preload):
            super().start()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD of the library needs Linux")
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler (c++) here")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has real CUDA devices")
    ranks = Gpus(fake_cuda.compile_library(tmp_path_factory.mktemp("library")))
    yield ranks
    ranks.stop()


@pytest.mark.slow(proves="what only a CUDA device's code paths do")
@pytest.mark.parametrize("text, ranks, accum", CASES)
def test_a_step_does_not_wait_for_the_gpu(gpus, tokens, tmp_path, text, ranks, accum):
    """Kernels accept their operands, and a run that saves continues from its checkpoint."""
    dp_size = ranks // 2 if "--tp 2" in text else ranks
    few = f"--n_layer 1 --micro_batch_size 1 --global_batch_size {accum * dp_size}"
    few += " --eval_sequences 1 --keep_last 0"
    argv = flags(f"--device cuda --data {tokens} --out {tmp_path}/run {few} --strategy {text}")
    allowed = OUTSIDE
    if "--sample_tokens" in text:
        allowed |= SAMPLING
    if "--keep_last" in text:
        allowed |= CHECKPOINTS | (ASYNC_SAVING if "--async_save" in text else SAVING)
    starts = [(2, 2), (3, 1)] if "--keep_last" in text else [(2, 2)]
    for max_steps, steps in starts:
        answers = gpus(ranks, play, [*argv, "--max_steps", str(max_steps)], timeout=200)
        for crossings, refusals in answers:
            assert not refusals
            in_loop = {
                ("train.py micro_batches", "to cuda, pinned"): steps * accum,
                ("log.py row", "to cuda, pinned"): steps,
                ("log.py row", "to cpu, pinned"): steps,
            }
            if "--optim_metrics_interval" in text:
                in_loop["optim.py statistics", ASKS] = mock.ANY
            found = {tuple(what): n for (part, *what), n in crossings.items() if part == "loop"}
            assert found == in_loop
            assert {tuple(what) for part, *what in crossings if part != "loop"} <= allowed


def attention_shapes(config: ModelConfig, prompts: list[int], multiple: int) -> set[tuple]:
    """Sample a token after prompts of these lengths; return the shapes of attention's input."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    shapes = set()

    def see(attention, inputs) -> None:
        shapes.add(tuple(inputs[0].shape))

    with fakes, fake_cuda.Gpu(fakes):
        with torch.device("cuda"):
            model = Transformer(config)
        for block in model.blocks:
            block.attention.register_forward_pre_hook(see)
        size = {"seq_len": config.seq_len, "vocab_size": config.vocab_size, "multiple": multiple}
        for n in prompts:
            assert len(list(generate(model, [0] * n, 1, **size, device="cuda"))) == 1
    return shapes


@pytest.mark.slow(proves="the shapes that a GPU's attention gets")
@pytest.mark.parametrize(
    "seq_len, multiple, lengths",
    [
        (128, 128, [128]),  # tiny
        (1024, 128, [256, 384, 512]),  # gpt2-124m
        (1024, 384, [384, 768]),  # with --tp 3
        (70, 128, [128]),  # longer than the model's context
    ],
)
def test_a_sample_needs_few_plans_of_attention(gpus, seq_len, multiple, lengths):
    """Each new shape costs cuDNN about half a second."""
    config = dataclasses.replace(SIZES["tiny"], seq_len=seq_len)
    prompts = [seq_len // 4 + n for n in (0, 1, 127, 128, 129, 255)]  # of a sample of 256 tokens
    (shapes,) = gpus(1, attention_shapes, config, prompts, multiple)
    assert shapes == {(1, length, 128) for length in lengths}


def groups_on_gpus(shape: tuple[int, int, int]) -> tuple[str, list[tuple[list[int], float]]]:
    """Return this rank's device, and the members and the timeout of its group on each axis."""
    fake_cuda.install()
    world = dist.start("cuda", timedelta(seconds=77))
    mesh = dist.make_mesh(world, shape)
    assert torch.distributed.get_backend_config() == "cpu:gloo,cuda:nccl"
    found = []
    for group in mesh.get_all_groups():
        # There is no public way to read a group's timeout.
        timeout = group._get_backend(world.device).options._timeout
        members = torch.distributed.get_process_group_ranks(group)
        found.append((members, timeout.total_seconds()))
    dist.on_all_ranks(int)  # no rank exits while another one is still connecting
    return str(world.device), found


@pytest.mark.slow(proves="the options of NCCL's groups")
def test_make_mesh_sets_the_timeout_of_nccl_groups(gpus):
    for rank, (device, groups) in enumerate(gpus(4, groups_on_gpus, (2, 2, 1))):
        replicas, shards = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert device == f"cuda:{rank}"
        assert groups == [(replicas, 77), (shards, 77), ([rank], 77)]
