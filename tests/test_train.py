"""The command: what it prints, logs, refuses and survives."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Scalars, assert_same, call_train, flags, listen, rows, start_run

import checkpoint
import data
import dist
import model
import train

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def spawn(command: list, **options) -> subprocess.Popen:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **options,
    )


def test_the_command_of_the_readme(tmp_path):
    """Shortened to 30 steps; it prepares the built-in data where it is started."""
    short = ["--max_steps", "30", "--eval_interval", "0"]
    command = [*TORCHRUN, "2", ROOT / "train.py", "--strategy", "fsdp", "--device", "cpu", *short]
    process = spawn(command, cwd=tmp_path)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert (tmp_path / "tokens/python/meta.json").exists()
    assert "fsdp: dp_replicate 1 x dp_shard 2 x tp 1 = 2 x cpu" in out
    assert (
        "32 sequences = micro-batch 16 x accumulation 1 x 2 ranks; x 128 tokens = 4,096 tokens a step"
        in out
    )
    assert re.search(r"^step 30/30 +100%  loss \d\.\d{4}", out, re.M)
    assert len(out.split("- sample -")[1]) > 256
    log = rows(tmp_path / "runs/tiny")
    assert [row["step"] for row in log] == [1, 10, 20, 30]
    assert log[-1]["tokens"] == 30 * 32 * 128 and log[-1]["loss"] < 4
    fields = """step tokens loss grad_norm lr clipped skipped_steps step_time step_time_min step_time_max slowest_rank
        tokens_per_second tokens_per_second_per_device
        mfu data_wait data_wait_min peak_device_memory peak_host_memory"""
    assert log[-1].keys() == set(fields.split())
    assert log[-1]["mfu"] is None and log[-1]["tokens_per_second"] == pytest.approx(
        4096 / log[-1]["step_time"]
    )
    assert rows(tmp_path / "runs/tiny", "val_loss")[-1]["val_loss"] < 4

    prompt = ["--prompt", "import", "--max_new_tokens", "20", "--seed", "3"]
    sample = [sys.executable, ROOT / "sample.py", "--run", tmp_path / "runs/tiny", *prompt]
    texts = [process.communicate()[0] for process in [spawn(sample), spawn(sample)]]
    assert texts[0] == texts[1] and texts[0].startswith("import") and len(texts[0]) > 20


def test_ctrl_c_saves_and_the_same_command_continues(run, tokens, tmp_path):
    text = "--max_steps 200 --keep_last 0 --strategy ddp"
    whole = run(2, text, "whole")
    stopped = tmp_path / "stopped"
    process = spawn(
        [*TORCHRUN, "2", ROOT / "train.py", *flags(f"--data {tokens} --out {stopped} {text}")]
    )
    deadline = time.monotonic() + 60
    while not (stopped / "metrics.jsonl").exists() or len(rows(stopped)) < 5:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: torchrun and both ranks get it
    out, _ = process.communicate(timeout=60)
    (saved,) = checkpoint.list_checkpoints(stopped)
    step = checkpoint.read_manifest(saved)["step"]
    assert 5 <= step < 200 and f"stopped after step {step}; the same command continues" in out
    run(2, text, "stopped")
    assert_same(whole, stopped)


def test_a_finished_run_says_so(run, tokens, pool):
    out = run(1, "--max_steps 3")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    ((status, said, _),) = pool(1, listen, flags(f"--data {tokens} --out {out} --max_steps 3"))
    assert status == 0 and "is finished, step 3 of 3" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_finished_run_without_checkpoints_says_so_and_an_unfinished_one_cannot_go_on(
    run, tokens, pool
):
    out = run(1, "--max_steps 3 --checkpoint none")
    (answer,) = pool(
        1, listen, flags(f"--data {tokens} --out {out} --max_steps 3 --checkpoint none")
    )
    assert answer[0] == 0 and "is finished, step 3 of 3" in answer[1]
    (answer,) = pool(1, listen, flags(f"--data {tokens} --out {out} --max_steps 5"))
    assert answer[0] == 2 and "cannot be continued" in answer[2]
    assert len(rows(out)) == 3


def test_a_folder_without_a_known_tokenizer_trains_to_the_end(run, tmp_path, monkeypatch):
    """nanoGPT's, without network: what lacks is the text of the sample."""
    np.tile(np.arange(50, dtype="<u2"), 100).tofile(tmp_path / "train.bin")
    np.tile(np.arange(50, dtype="<u2"), 100).tofile(tmp_path / "val.bin")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    out = tmp_path / "out"
    command = [
        sys.executable,
        ROOT / "train.py",
        *flags(f"--data {tmp_path} --out {out} --max_steps 2 --sample_tokens 4"),
    ]
    process = spawn(command, cwd=tmp_path)
    said, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "no text: the gpt2 tokenizer" in said or " sample " in said


def test_config_json_starts_the_same_run(run, tokens, pool, tmp_path):
    first = run(1, "--max_steps 3 --dtype float32 --beta2 0.99")
    assert pool(
        1,
        call_train,
        [
            "--config",
            str(first / "config.json"),
            "--out",
            str(tmp_path / "again"),
            "--min_lr",
            "1e-5",
        ],
    ) == [0]
    assert rows(first)[0]["loss"] == rows(tmp_path / "again")[0]["loss"]
    then, now = (
        json.loads((run / "config.json").read_text()) for run in (first, tmp_path / "again")
    )
    assert now == {**then, "out": str(tmp_path / "again"), "min_lr": 1e-5} and then["beta2"] == 0.99


BAD = {  # flags -> what the line says; {...} are folders of the fixture
    "--no_such_flag 1": "unrecognized arguments: --no_such_flag 1",
    "--max_steps ten": "argument --max_steps: invalid int value: 'ten'",
    "--strategy zero": "invalid choice: 'zero'",
    "--max_steps 0": "--max_steps 0 must be at least 1",
    "--lr -1": "--lr -1.0 must be at least 0",
    "--lr nan": "--lr nan must be at least 0",
    "--data {root}/nowhere": "no train.bin there; create it with: python prepare.py",
    "--seq_len 100000": "one sequence of --seq_len 100000 needs 100,001",
    "--data {high}": "train.bin holds token 300, above its vocabulary of 257",
    "--data {torn}": "is torn: 1,999 bytes are not 1,000 tokens of 2 bytes",
    "--d_model 30": "d_model 30 / n_head 4 must be a whole, even number",
    "--profile 2:2": "--profile 2:2: give START:STOP with START < STOP < max_steps 4, like 10:13",
    "--profile 1-3": "--profile 1-3: give START:STOP",
    "--tp 4": "n_kv_head 2 / tp 4 = 0.5, but each rank of a tp group takes a whole number: choose a --tp that divides 2",
    "--tp 2": "1 processes / tp 2 is not a whole number: start a multiple of 2 or change --tp",
    "--n_kv_head 3": "n_head 4 must be a multiple of n_kv_head 3",
    "--global_batch_size 6 --micro_batch_size 4": "6 is not a multiple of micro_batch_size 4 x 1 data-parallel ranks = 4",
    "--strategy fsdp --dp_replicate 2": "--strategy fsdp has dp_replicate 1, not 2",
    "--strategy hsdp --dp_shard 2": "dp_replicate 0 x dp_shard 2 = 0, but 1 processes",
    "--out {other} --resume never": "is not empty, and --resume never would overwrite it",
    "--out {other} --seed 7": "seed was 0 and is now 7",
    "--out {other} --data {changed}": "data was",
    "--out {other} --d_ff 80": "d_ff was 64 and is now 80",
    "--resume {root}": "no checkpoint there",
    "--out {other} --resume {other}/checkpoints/step-00000001": "is not the newest checkpoint of --out",
    "--out {foreign}": "holds files that are not train.py's",
    "--beta2 1": "--beta2 1.0 must be at least 0 and below 1",
    "--timeout inf": "--timeout inf must be at least 1 and below",
    "--seed 9999999999": "--seed 9999999999 must be at least 0 and below",
    "--device cuda": "PyTorch finds no CUDA device here",
    "--config {root}/nothing.json": "--config",
}


def write_tokens(folder: Path, tokens: np.ndarray) -> str:
    folder.mkdir()
    for split in ("train", "val"):
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
    meta = {
        "dtype": "uint16",
        "vocab_size": 257,
        "tokenizer": "bytes",
        "train_tokens": len(tokens),
        "val_tokens": len(tokens),
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


@pytest.fixture(scope="module")
def folders(pool, tokens, tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("bad")
    assert pool(
        1, call_train, flags(f"--data {tokens} --out {root}/other --max_steps 2 --save_interval 1")
    ) == [0]
    ramp = np.arange(1000) % 256
    found = {"root": root, "other": root / "other", "changed": write_tokens(root / "changed", ramp)}
    found["high"] = write_tokens(root / "high", np.where(ramp == 200, 300, ramp))
    found["torn"] = write_tokens(root / "torn", ramp)
    found["foreign"] = root / "foreign"
    found["foreign"].mkdir()
    (found["foreign"] / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with open(root / "torn" / "train.bin", "r+b") as file:
        file.truncate(1999)
    return found


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_one_clear_line_and_exit_status_2(text, folders, tokens, pool):
    if text == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    before = {path: path.read_bytes() for path in folders["root"].rglob("*") if path.is_file()}
    argv = flags(
        f"--data {tokens} --out {folders['root']}/new --max_steps 4 {text.format(**folders)}"
    )
    ((status, out, err),) = pool(1, listen, argv)
    assert status == 2 and err.count("\n") == 1 and out == ""
    assert err.startswith("train.py: error: ") and BAD[text] in err
    assert {
        path: path.read_bytes() for path in folders["root"].rglob("*") if path.is_file()
    } == before


def test_a_mesh_that_does_not_fit_the_world_is_refused_on_every_rank(pool, tokens, tmp_path):
    answers = pool(
        3, listen, flags(f"--data {tokens} --out {tmp_path}/new --strategy fsdp --dp_shard 2")
    )
    assert [status for status, _, _ in answers] == [2, 2, 2]
    line = "dp_replicate 1 x dp_shard 2 = 2, but 3 processes were started: choose"
    assert answers[0][2].startswith(f"train.py: error: {line}") and answers[0][2].count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "arguments, shape",
    [
        (("single", 1, 1, None, None), (1, 1, 1)),
        (("ddp", 6, 2, None, None), (6, 1, 1)),
        (("fsdp", 6, 2, None, None), (1, 6, 1)),
        (("hsdp", 8, 4, None, None), (2, 4, 1)),  # two hosts of four
        (("hsdp", 8, 8, None, None), (1, 8, 1)),
        (("hsdp", 8, 8, 4, None), (4, 2, 1)),
        (("hsdp", 8, 4, None, 8), (1, 8, 1)),
        (("hsdp", 8, 4, 2, 4), (2, 4, 1)),
        (("single", 4, 4, None, None, 4), (1, 1, 4)),
        (("fsdp", 256, 8, None, None, 8), (1, 32, 8)),  # Llama-3 70B's
        (("hsdp", 16, 8, None, None, 2), (2, 4, 2)),
    ],
)
def test_mesh_shapes(arguments, shape):
    assert dist.mesh_shape(*arguments) == shape


def count_reads(argv: list[str]) -> dict[str, int]:
    """How often the host asked for a tensor's value, in the whole loop of a run, by the name of the method.

    On a CPU nothing waits, so every way to ask is replaced by one that counts; a dispatch mode adds what asks from inside.
    """
    reads: dict[str, int] = {}

    def counting(name: str, method):
        def ask(tensor, *arguments, **options):
            reads[name] = reads.get(name, 0) + 1
            return method(tensor, *arguments, **options)

        return ask

    run = start_run(argv)
    run.build()
    names = (
        "item",
        "tolist",
        "cpu",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__format__",
        "__repr__",
        "nonzero",
    )
    methods = {name: getattr(torch.Tensor, name) for name in names}
    run.evaluate = lambda: None  # evaluations wait
    for name, method in methods.items():
        setattr(torch.Tensor, name, counting(name, method))
    with Scalars() as scalars:
        assert train.train(run) == 0
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    return reads | {"inner": scalars.count}


@pytest.mark.parametrize("mesh", ["single", "ddp", "fsdp", "hsdp --dp_shard 2 --dp_replicate 2"])
def test_the_host_reads_from_the_device_on_log_steps_only(pool, tokens, tmp_path, mesh):
    """Steps 1, 5 and 6 of 6 log: one read each. Before them DataLoader reads a seed of its own, on the host."""
    ranks = {"single": 1, "ddp": 2, "fsdp": 2}.get(mesh, 4)
    argv = flags(
        f"--data {tokens} --out {tmp_path}/run --strategy {mesh} --micro_batch_size 1 --max_steps 6 --checkpoint none"
    )
    assert (
        pool(ranks, count_reads, [*argv, "--log_interval", "5"])
        == [{"item": 1, "tolist": 3, "inner": 1}] * ranks
    )


class Still(torch.optim.SGD):
    def __init__(self, groups, **options):
        super().__init__(groups)

    def step(self):
        pass


def test_no_value_leaves_the_device_in_a_step(tokens, monkeypatch):
    """On the meta device a tensor has no data: a copy to the host, or a decision by it, raises. (AdamW itself is torch's.)"""
    net = train.Transformer(
        model.ModelConfig(320, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=64, seq_len=16)
    ).to("meta")
    monkeypatch.setattr(torch.optim, "AdamW", Still)
    run = object.__new__(train.Run)
    run.config, run.device, run.step, run.accumulation = train.Config(), torch.device("meta"), 0, 2
    run.model = run.forward = net
    run.optimizer = train.optim.Optimizer(net.named_parameters(), net.decays, lambda step: 0.1)
    metrics = run.train_step(iter(torch.zeros(2, 4, 17, dtype=torch.long, device="meta")))
    assert {value.device.type for value in metrics.values()} == {"meta"}
    with pytest.raises((RuntimeError, NotImplementedError)):
        metrics["loss"].item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_no_sync_on_cuda(pool, tokens, tmp_path, strategy):
    argv = flags(
        f"--data {tokens} --out {tmp_path}/run --strategy {strategy} --micro_batch_size 2"
    ) + [
        "--device",
        "cuda",
    ]
    assert pool(1, cuda_steps, argv) == [0]


def cuda_steps(argv: list[str]) -> int:
    config = train.parse(argv)
    run = train.Run(config, dist.start("cuda"))
    run.build()
    batches = run.fetch(
        run.train_windows,
        data.train_indices(range(1, 7), config.global_batch_size, run.micro, run.rank, run.ranks),
    )
    for _ in range(3):  # the first step allocates
        run.train_step(batches)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        metrics = run.train_step(batches)
        run.send(metrics)  # a row of the log in every step
    torch.cuda.set_sync_debug_mode("default")
    run.receive()
    return 0


@pytest.mark.slow
def test_the_default_run_learns_in_three_minutes(tmp_path):
    began = time.monotonic()
    subprocess.run(
        [*TORCHRUN, "2", ROOT / "train.py", "--strategy", "fsdp"],
        cwd=tmp_path,
        check=True,
        timeout=400,
    )
    assert time.monotonic() - began < 180
    assert rows(tmp_path / "runs/tiny", "val_loss")[-1]["val_loss"] <= 1.6
