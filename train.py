"""The run: configuration, loop and log.

    torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
from torch import Tensor

import checkpoint
import data
import dist
import optim
from model import SIZES, ModelConfig, Transformer, generate

BUILTIN = "tokens/python"

# Dense bfloat16 peaks in FLOP/s, from NVIDIA's data sheets (SXM parts, without sparsity). A device that is not here has no MFU.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


class UsageError(ValueError):
    """Flags that do not fit together or with what is there."""


def flag(default, help: str):
    return field(default=default, metadata={"help": help})


# fmt: off
@dataclass(frozen=True)
class Config:
    data: str = flag(BUILTIN, "token folder, written by data.py or nanoGPT; the default is prepared on first use from the installed Python's library")
    out: str | None = flag(None, "run folder (default: runs/MODEL)")
    # model
    model: Literal[tuple(SIZES)] = flag("tiny", "named size; the next six override parts of it")
    n_layer: int | None = flag(None, "blocks")
    n_head: int | None = flag(None, "attention heads")
    n_kv_head: int | None = flag(None, "key and value heads; fewer than n_head is grouped-query attention")
    d_model: int | None = flag(None, "width")
    d_ff: int | None = flag(None, "width of the MLP's hidden layer")
    seq_len: int | None = flag(None, "tokens in a sequence")
    # what runs where
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = flag("auto", "auto is single on one process and ddp on several")
    dp_replicate: int | None = flag(None, "copies of the weights (default: the strategy's; for hsdp the number of hosts)")
    dp_shard: int | None = flag(None, "ranks that share one copy (default: the strategy's; for hsdp the ranks of a host)")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto takes the GPUs where there are any")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "compute dtype; auto is bfloat16 where the hardware has it; weights and reductions stay float32")
    timeout: float = flag(600.0, "seconds after which a collective that does not finish ends the run")
    # batch
    global_batch_size: int = flag(32, "sequences per optimizer step over all ranks")
    micro_batch_size: int | None = flag(None, "sequences per rank and forward; less than its share of the step is gradient accumulation (default: its whole share)")
    grad_sync: Literal["batch", "micro_batch"] = flag("batch", "average gradients once per step, or after every micro-batch: more traffic, under fsdp less memory")
    num_workers: int | None = flag(None, "processes per rank that read ahead (default: 2 with GPUs, none without)")
    seed: int = flag(0, "of the initial weights and of the order of the data")
    # optimizer
    max_steps: int = flag(600, "optimizer steps in all")
    lr: float | None = flag(None, "highest learning rate (default: 0.5 / d_model, close to GPT-3's table: 6.5e-4 at 768 wide, 1.2e-4 at 4096)")
    min_lr: float = flag(0.0, "learning rate that the schedule ends at")
    warmup_steps: int = flag(50, "steps of linear warm-up from 0 to lr")
    schedule: Literal[tuple(optim.SCHEDULES)] = flag("cosine", "from lr to min_lr; wsd stays at lr and falls over the last fifth")
    weight_decay: float = flag(0.1, "AdamW's, on matrices only")
    beta1: float = flag(0.9, "AdamW's decay of the mean of gradients")
    beta2: float = flag(0.95, "AdamW's decay of the mean of their squares")
    eps: float = flag(1e-8, "AdamW's")
    max_grad_norm: float = flag(1.0, "the gradient is scaled down to this global norm; inf for no clipping")
    # cadence, in steps; 0 is only at the end
    log_interval: int = flag(10, "steps between log rows; only these wait for the device")
    eval_interval: int = flag(250, "steps between evaluations; 0 is only at the end")
    eval_sequences: int = flag(512, "validation sequences of an evaluation, the same at each")
    sample_tokens: int = flag(256, "tokens of text written at the end of the run; 0 is none")
    save_interval: int = flag(250, "steps between checkpoints; 0 is only at the end")
    keep_last: int = flag(2, "checkpoints kept; 0 keeps all")
    # checkpoints
    checkpoint: Literal["sharded", "none"] = flag("sharded", "each rank writes its own part, or nothing is saved")
    resume: str = flag("auto", "auto continues the run in --out; never wants an empty --out; PATH of a checkpoint begins there")
# fmt: on


def parse(argv: list[str] | None = None) -> Config:
    """Flags -> Config: each field is a flag of its name and type. A --config file stands before the other flags."""
    parser = argparse.ArgumentParser(
        prog="train.py", allow_abbrev=False,
        description="Train a language model. Alone it is one process; torchrun --nproc_per_node N starts N.",
    )  # fmt: skip
    parser.error = lambda message: (_ for _ in ()).throw(UsageError(f"{message} (python train.py --help lists the flags)"))
    parser.add_argument("--config", metavar="FILE.json", help="a config.json of another run; flags after it override")
    for f in dataclasses.fields(Config):
        kind = next(t for t in (get_args(f.type) if get_origin(f.type) is not Literal else ()) or (f.type,) if t is not type(None))
        choices = get_args(kind) if get_origin(kind) is Literal else None
        parser.add_argument(
            f"--{f.name}", type=str if choices else kind, choices=choices, default=f.default, metavar=None if choices else kind.__name__.upper(),
            help=f.metadata["help"] + ("" if f.default is None else f" (default: {f.default})"),
        )  # fmt: skip
    argv = sys.argv[1:] if argv is None else argv
    file = parser.parse_known_args(argv)[0].config
    args = vars(parser.parse_args(config_flags(file) + argv if file else argv))
    del args["config"]
    config = Config(**args)
    for name in ("global_batch_size", "micro_batch_size", "seq_len", "max_steps", "log_interval", "eval_sequences", "dp_replicate", "dp_shard", "max_grad_norm", "timeout"):
        if (value := getattr(config, name)) is not None and not value > 0:
            raise UsageError(f"--{name} {value} must be above 0")
    for name in ("seed", "warmup_steps", "eval_interval", "save_interval", "sample_tokens", "keep_last", "num_workers", "lr", "min_lr", "weight_decay"):
        if (value := getattr(config, name)) is not None and not value >= 0:
            raise UsageError(f"--{name} {value} must not be negative")
    return dataclasses.replace(config, out=config.out or f"runs/{config.model}")


def config_flags(file: str) -> list[str]:
    """A saved config.json as the flags that it stands for, so that one parser checks both."""
    try:
        items = json.loads(Path(file).read_text()).items()
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--config {file}: {error}") from None
    return [f"--{name}={value}" for name, value in items if value is not None]


# ---------------------------------------------------------------------------------------------------------------
# Before the first step


def model_config(config: Config, vocab_size: int) -> ModelConfig:
    """The named size with the overrides and the data's vocabulary, padded to a multiple of 64: odd sizes miss the fast matrix kernels."""
    names = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "seq_len")
    overrides = {name: value for name in names if (value := getattr(config, name)) is not None}
    if config.n_head and not config.n_kv_head and SIZES[config.model].n_head == SIZES[config.model].n_kv_head:
        overrides["n_kv_head"] = config.n_head
    try:
        return dataclasses.replace(SIZES[config.model], vocab_size=-(-vocab_size // 64) * 64, **overrides)
    except ValueError as error:
        raise UsageError(str(error)) from None


def batch_shape(config: Config, ranks: int) -> tuple[int, int]:
    """(micro-batch size, accumulation): global_batch_size = micro_batch_size x accumulation x dp ranks."""
    micro = config.micro_batch_size or max(1, config.global_batch_size // ranks)
    accumulation = config.global_batch_size // (micro * ranks)
    if micro * accumulation * ranks != config.global_batch_size or not accumulation:
        raise UsageError(
            f"global_batch_size {config.global_batch_size} is not a multiple of micro_batch_size {micro} x {ranks} data-parallel ranks "
            f"= {micro * ranks}: change --global_batch_size or --micro_batch_size"
        )
    return micro, accumulation


def compute_dtype(config: Config, device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, why)"""
    if config.dtype != "auto":
        return getattr(torch, config.dtype), "as asked"
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return (torch.bfloat16, "the hardware has it") if fast else (torch.float32, "no bfloat16 instructions here")


def choose_attention(device: torch.device, seq_len: int) -> None:
    """On CPUs the backward pass of SDPA's flash kernel is slow: up to 512 tokens plain softmax(q k) v takes half its time.

    SDPA then runs its "math" form, in the inputs' dtype. (The switches live in torch.backends.cuda but hold for CPUs too.)
    """
    if device.type == "cpu":
        torch.backends.cuda.enable_flash_sdp(seq_len > 512)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)


def identity(manifest: dict) -> dict:
    """What must not change within a run, since its numbers would: the model's shape, the data and their order."""
    return {**manifest["model"], "data fingerprint": manifest["data"], **{key: manifest["config"][key] for key in ("global_batch_size", "seed")}}


def starting_point(config: Config, manifest: dict) -> tuple[Path | None, int]:
    """(checkpoint to begin with, its step), or (None, 0) for a new run. Raises UsageError where the two do not go together.

    The run's own newest checkpoint comes before --resume PATH, so that the same command can be given again.
    """
    out = Path(config.out)
    saved = checkpoint.saved(out)
    if config.resume == "never":
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"--out {out} is not empty and --resume never would overwrite it: choose another --out")
        return None, 0
    if saved:
        path = saved[-1]
    elif config.resume == "auto":
        if (out / "config.json").exists() and json.loads((out / "config.json").read_text())["checkpoint"] == "none":
            raise UsageError(f"--out {out} holds a run that saved no checkpoints, so it cannot be continued: choose another --out")
        return None, 0
    else:
        path = Path(config.resume)
        if not (path / "manifest.json").is_file():
            raise UsageError(f"--resume {path}: no checkpoint there; give a folder like runs/tiny/checkpoints/step-00000100, auto or never")
    then = checkpoint.read_manifest(path)
    was, now = identity(then), identity(manifest)
    if differing := [f"{key} was {was.get(key)} and is now {now[key]}" for key in now if now[key] != was.get(key)]:
        raise UsageError(f"{path} cannot be continued: {', '.join(differing)}; change that back or choose another --out")
    return path, then["step"]


# ---------------------------------------------------------------------------------------------------------------
# The run


class Log:
    """Rows for metrics.jsonl and lines for the console, from rank 0 alone."""

    def __init__(self, out: Path, step: int, first: bool):
        self.path, self.first = out / "metrics.jsonl", first
        if first:
            # What was logged after the checkpoint that the run continues from will come again, the same.
            lines = self.path.read_text().splitlines() if self.path.exists() else []
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            replace(self.path, "".join(f"{line}\n" for line in kept))

    def row(self, **values) -> None:
        if self.first:
            with open(self.path, "a") as file:
                file.write(json.dumps(values) + "\n")

    def say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    work = path.with_name(f".{path.name}.tmp")
    work.write_text(text)
    os.replace(work, path)


def peak_host_memory() -> int:
    """Of this process so far, in bytes (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Run:
    """Everything that a step needs, put together from the ground floor."""

    def __init__(self, config: Config, world: dist.World):
        self.config, self.world = config, world
        c, device = config, world.device
        strategy = c.strategy if c.strategy != "auto" else "ddp" if world.size > 1 else "single"
        shape = dist.mesh_shape(strategy, world.size, world.local_size, c.dp_replicate, c.dp_shard)
        self.ranks = shape[0] * shape[1]
        self.micro, self.accumulation = batch_shape(c, self.ranks)
        self.dtype, why = compute_dtype(c, device)

        self.folder = data.open_folder(Path(c.data))
        shape_of_model = model_config(c, self.folder.vocab_size)
        self.seq_len = shape_of_model.seq_len
        self.train_windows = data.Windows(self.folder, "train", self.seq_len, c.seed)
        self.val_windows = data.Windows(self.folder, "val", self.seq_len, None)
        self.manifest = {
            "config": dataclasses.asdict(c), "model": dataclasses.asdict(shape_of_model), "data": self.folder.fingerprint,
            "tokenizer": self.folder.tokenizer, "tokens_in_vocabulary": self.folder.vocab_size,
        }  # fmt: skip
        self.path, self.step = dist.on_first_rank(lambda: starting_point(c, self.manifest))
        self.finished = self.step >= c.max_steps
        if self.finished:
            return

        self.mesh = dist.make_mesh(device, shape)
        self.rank = dist.dp_rank(self.mesh)
        choose_attention(device, self.seq_len)
        with torch.device("meta"):
            self.model = Transformer(shape_of_model, self.dtype)
        self.flops_per_token = self.model.flops_per_token(self.seq_len)
        self.forward = dist.parallelize(
            self.model, self.model.blocks, self.mesh, strategy, self.dtype, device, lambda name, tensor: self.model.init_tensor(name, tensor, c.seed)
        )
        self.optimizer = optim.Optimizer(
            self.model.named_parameters(), self.model.decays,
            weight_decay=c.weight_decay, betas=(c.beta1, c.beta2), eps=c.eps, max_grad_norm=c.max_grad_norm,
        )  # fmt: skip
        self.state = {"model": {name: p.detach() for name, p in self.model.named_parameters()}, "optimizer": self.optimizer.state()}
        if self.path:
            checkpoint.load(self.path, self.state)
        if world.rank == 0:
            Path(c.out).mkdir(parents=True, exist_ok=True)
            replace(Path(c.out) / "config.json", json.dumps(dataclasses.asdict(c), indent=2) + "\n")
        self.log = Log(Path(c.out), self.step, world.rank == 0)
        self.data_wait = 0.0
        self.introduce(strategy, shape, why)

    def introduce(self, strategy: str, shape: tuple[int, int], why: str) -> None:
        """Say what runs where."""
        c, m, world, say = self.config, self.model.config, self.world, self.log.say
        total = self.model.parameter_count()
        own = sum(optim.local(p).numel() for p in self.model.parameters())
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads a rank"
        tokens = c.global_batch_size * self.seq_len
        epochs = c.max_steps * c.global_batch_size / len(self.train_windows)
        say(f"model   {c.model}: {m.n_layer} layers x {m.d_model} wide, vocabulary {m.vocab_size:,}; {total:,} parameters, {own:,} on this rank")
        say(f"mesh    {strategy}: dp_replicate {shape[0]} x dp_shard {shape[1]} = {world.size} x {world.device.type} ({name})")
        say(f"dtype   {str(self.dtype).removeprefix('torch.')} ({why}); weights, reductions and optimizer float32")
        say(f"batch   {c.global_batch_size} sequences = micro-batch {self.micro} x accumulation {self.accumulation} x {self.ranks} ranks; "
            f"x {self.seq_len} = {tokens:,} tokens a step")  # fmt: skip
        say(f"data    {c.data}: {len(self.train_windows):,} sequences; {c.max_steps:,} steps read {c.max_steps * tokens:,} tokens, {epochs:.2f} epochs")
        # float32 weight 4 + gradient 4 + AdamW's two moments 8 = 16 bytes a parameter; without FSDP's reshard in between
        say(f"memory  16 bytes x {own:,} = {16 * own / 1e6:,.1f} MB a rank for weights, gradients and optimizer; activations come on top")
        say(f"out     {c.out}" + (f": continues from {self.path} at step {self.step}" if self.path else ""))

    def fetch(self, windows: data.Windows, numbers: Iterator[list[int]]) -> Iterator[Tensor]:
        """Batches (m, T + 1) on the device; the copy from pinned memory does not hold the host up."""
        cuda = self.world.device.type == "cuda"
        workers = self.config.num_workers if self.config.num_workers is not None else 2 if cuda else 0
        batches = data.loader(windows, numbers, workers, pin=cuda)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.data_wait += time.perf_counter() - began
            if batch is None:
                return
            yield batch.to(self.world.device, non_blocking=True)

    def train_step(self, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        """One optimizer step over global_batch_size sequences. Returns 0-d tensors on the device; does not wait for it."""
        loss = torch.zeros((), device=self.world.device)
        for micro in range(self.accumulation):
            last = micro == self.accumulation - 1
            tokens = next(batches)
            with dist.gradient_sync(self.forward, last or self.config.grad_sync == "micro_batch"):
                # Mean over the micro-batch / accumulation: their sum, averaged over ranks, is the mean over the global batch.
                part = self.forward(tokens[:, :-1], tokens[:, 1:]) / self.accumulation
                part.backward()
            loss += part.detach()
        c = self.config
        self.lr = optim.learning_rate(
            self.step, schedule=c.schedule, lr=c.lr if c.lr is not None else 0.5 / self.model.config.d_model, min_lr=c.min_lr, warmup_steps=c.warmup_steps, max_steps=c.max_steps
        )
        metrics = self.optimizer.step(self.lr)
        self.step += 1
        return {"loss": loss, **metrics}

    def collect(self, metrics: dict[str, Tensor], interrupted: list) -> tuple[dict, bool]:
        """(row of the log, whether any rank was interrupted): one small collective and one copy to the host, which waits for it."""
        device = self.world.device
        own = [self.data_wait, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, peak_host_memory(), len(interrupted)]
        self.data_wait = 0.0
        values = torch.cat([torch.stack([value.double() for value in metrics.values()]), torch.tensor(own, dtype=torch.float64, device=device)])
        ranks = list(zip(*dist.gather(values).tolist()))  # a tuple over ranks for each value
        row = {name: column[0] for name, column in zip(metrics, ranks)}  # the same on all ranks, but for:
        row["loss"] = sum(ranks[0]) / len(ranks[0])
        row["clipped"], row["skipped_steps"] = int(row["clipped"]), int(row["skipped_steps"])
        wait, device_memory, host_memory, stop = (max(column) for column in ranks[len(metrics) :])
        return {**row, "lr": self.lr, "data_wait": wait, "peak_device_memory": int(device_memory), "peak_host_memory": int(host_memory)}, stop > 0

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the fixed validation set; a collective, as every forward is."""
        count = min(self.config.eval_sequences, len(self.val_windows))
        lists = list(data.val_numbers(count, len(self.val_windows), self.micro, self.rank, self.ranks))
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        waited = self.data_wait
        # A rank that has run out joins the forward with window 0, which weighs nothing.
        for numbers, tokens in zip(lists, self.fetch(self.val_windows, (numbers or [0] for numbers in lists))):
            total += self.forward(tokens[:, :-1], tokens[:, 1:]) * len(numbers)
        self.data_wait = waited
        return dist.gather(total[None]).sum().item() / count

    def save(self) -> dict:
        tokens = self.step * self.config.global_batch_size * self.seq_len
        return checkpoint.save(Path(self.config.out), self.state, {"step": self.step, "tokens": tokens, **self.manifest}, self.config.keep_last)

    def sample(self) -> str:
        """How the model continues the first tokens of the validation set; the forward is collective, so all ranks take part."""
        prompt = self.folder.tokens("val")[: max(1, self.seq_len // 4)].tolist()
        tokens = generate(
            self.forward, prompt, self.config.sample_tokens, seq_len=self.seq_len, vocab_size=self.folder.vocab_size,
            device=self.world.device, temperature=0.8,
        )  # fmt: skip
        return "".join(data.decode(self.folder.tokenizer, prompt + list(tokens)))


def train(run: Run) -> int:
    """The loop; returns the exit status. The host waits for the device on log steps only, and evaluates and saves after one."""
    c, log = run.config, run.log
    tokens_per_step = c.global_batch_size * run.seq_len
    peak = next((peak for name, peak in PEAK_FLOPS.items() if run.world.device.type == "cuda" and name in torch.cuda.get_device_name()), None)
    interrupted = catch_interrupt()
    batches = run.fetch(run.train_windows, data.train_numbers(range(run.step, c.max_steps), c.global_batch_size, run.micro, run.rank, run.ranks))
    logged, mark = run.step, time.perf_counter()
    first = run.step + 1
    while run.step < c.max_steps:
        metrics = run.train_step(batches)
        step, last = run.step, run.step == c.max_steps
        evaluates, saves = (last or interval and step % interval == 0 for interval in (c.eval_interval, c.save_interval))
        if not (evaluates or saves or step == first or step % c.log_interval == 0):
            continue

        row, stop = run.collect(metrics, interrupted)
        step_time = (time.perf_counter() - mark) / (step - logged)
        per_device = tokens_per_step / step_time / run.world.size
        row |= {
            "step_time": step_time, "tokens_per_second": tokens_per_step / step_time, "tokens_per_second_per_device": per_device,
            "mfu": per_device * run.flops_per_token / peak if peak and run.dtype == torch.bfloat16 else None,
        }  # fmt: skip
        log.row(step=step, tokens=step * tokens_per_step, **row)
        log.say(console(step, c.max_steps, row))
        if evaluates and not stop:
            val_loss = run.evaluate()
            log.row(step=step, val_loss=val_loss)
            log.say(f"step {step:>{len(str(c.max_steps))}}  val_loss {val_loss:.4f} over {min(c.eval_sequences, len(run.val_windows))} sequences")
        if (saves or stop) and c.checkpoint != "none":
            saved = run.save()
            log.row(step=step, event="checkpoint", **saved, blocking_seconds=saved["seconds"], peak_host_memory=peak_host_memory())
            log.say(f"step {step:>{len(str(c.max_steps))}}  saved {saved['path']}: {saved['bytes'] / 1e6:,.1f} MB in {saved['seconds']:.2f} s")
        if stop:
            log.say(f"interrupted after step {step}; the same command continues")
            return 130
        logged, mark = step, time.perf_counter()
    if c.sample_tokens:
        log.say(f"sample  {'-' * 72}\n{run.sample()}\n{'-' * 80}")
    return 0


def console(step: int, steps: int, row: dict) -> str:
    left = (steps - step) * row["step_time"]
    mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] is not None else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps}  {step / steps:4.0%}  loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_second']:>9,.0f} tok/s{mfu}  {row['step_time'] * 1e3:6.1f} ms  left {left // 60:.0f}m{left % 60:02.0f}s"
    )


def catch_interrupt() -> list:
    """A list that fills when SIGINT comes: the run then saves at the next log step, where the ranks agree on it, and stops."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    return received


def main(argv: list[str] | None = None) -> int:
    try:
        config = parse(argv)
        world = dist.start(config.device, config.timeout)
        if config.data == BUILTIN and world.local_rank == 0 and not Path(BUILTIN).exists():
            data.prepare(None, Path(BUILTIN))
        torch.distributed.barrier()
        run = Run(config, world)
        if run.finished:
            if world.rank == 0:
                print(f"{config.out} is finished, step {run.step} of {config.max_steps}: raise --max_steps to go on, or choose another --out")
            status = 0
        else:
            status = train(run)
        dist.stop()
        return status
    except (UsageError, data.DataError, dist.MeshError) as error:
        return fail(error, 2)
    except (checkpoint.CheckpointError, OSError) as error:
        return fail(error, 1)
    except torch.OutOfMemoryError as error:
        return fail(f"{str(error).splitlines()[0]} Lower --micro_batch_size or --seq_len, or use more ranks with --strategy fsdp", 1)


def fail(error: object, status: int) -> int:
    """Say what is wrong in one line. Rank 0 speaks first: an error that all ranks meet is printed once, since torchrun ends
    the others when one exits, and a rank that is still there after three seconds has an error of its own."""
    rank = int(os.environ.get("RANK", 0))
    if rank:
        time.sleep(3)
    print(f"train.py: error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
