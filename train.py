"""The run: where it begins, the loop and the log.

torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import data
import dist
import optim
import prepare
import profiling
import tokenizer
import watchdog
from config import BUILTIN, Config, UsageError, batch_shape, model_config, parse, profile_window
from model import SIZES, Transformer, generate


class Diverged(RuntimeError):
    """Training that no longer makes progress."""


# ---------------------------------------------------------------------------------------------------------------
# Where a run begins


def identity(manifest: dict) -> dict:
    """What cannot change within a run without changing its numbers: the model's shape, the data and their order."""
    order = {key: manifest["config"][key] for key in ("global_batch_size", "seed")}
    return {**manifest["model"], "data": manifest["data"], **order}


def steps_without_checkpoint(out: Path, max_steps: int) -> int:
    """0, or the steps of a run in `out` that was to save nothing: it can be finished, but not continued."""
    try:
        before = json.loads((out / "config.json").read_text())
        if before["checkpoint"] != "none":
            return 0
        steps = [
            json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        if steps and steps[-1] >= max_steps:
            return steps[-1]
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--out {out} holds files that are not train.py's ({error!r}): choose another --out"
        ) from None
    raise UsageError(
        f"--out {out} holds a run that saved no checkpoints and cannot be continued: choose another --out"
    )


def starting_point(config: Config, manifest: dict, newest: Path | None) -> tuple[Path | None, int]:
    """(checkpoint to continue from, its step), or (None, 0) for a new run. Raises UsageError where they do not fit.

    The run's own `newest` one comes before --resume PATH, so that the same command can be given again.
    """
    out = Path(config.out)
    named = None if config.resume in ("auto", "never") else Path(config.resume)
    if config.resume == "never" and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"--out {out} is not empty, and --resume never would overwrite it: choose another --out"
        )
    if named and not (named / "manifest.json").is_file():
        raise UsageError(
            f"--resume {named}: no checkpoint there; give one like runs/tiny/checkpoints/step-00000250"
        )
    if (
        named
        and newest
        and named.resolve() != newest.resolve()
        and named.resolve().parent == newest.resolve().parent
    ):
        raise UsageError(
            f"--resume {named} is not the newest checkpoint of --out {out}: choose another --out for a branch"
        )
    if named and not newest and (problem := checkpoint.verify(named)):
        raise checkpoint.CheckpointError(f"--resume {named}: {problem}")
    path = newest or named
    if path is None:
        return None, steps_without_checkpoint(out, config.max_steps)
    then = checkpoint.read_manifest(path)
    try:
        was, now = identity(then), identity(manifest)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no checkpoint of train.py: its manifest.json lacks {error}"
        ) from None
    if changed := [
        f"{key} was {was.get(key)} and is now {now[key]}" for key in now if now[key] != was.get(key)
    ]:
        raise UsageError(
            f"{path} cannot be continued: {', '.join(changed)}; change that back or choose another --out"
        )
    return path, then["step"]


def source_hash() -> str:
    """Of the Python files that a run is made of."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


# ---------------------------------------------------------------------------------------------------------------
# Log


class Log:
    """Rows of metrics.jsonl and optim.jsonl, and lines of the console, from rank 0 alone."""

    def __init__(self, out: Path, step: int, steps: int, first: bool):
        self.out, self.steps, self.first = out, steps, first
        self.unwritten: dict[str, bytes] = {}
        for path in (out / "metrics.jsonl", out / "optim.jsonl"):
            if (
                first and path.exists()
            ):  # what came after the checkpoint that the run continues from will come again, the same
                lines = (line for line in path.read_text().splitlines() if line.endswith("}"))
                replace_file(
                    path, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step)
                )

    def write(self, name: str, rows: Iterable[dict]) -> None:
        """Append; what a full disk does not take waits for the next time."""
        if not self.first:
            return
        for row in rows:
            infinite = {
                key: None
                for key, value in row.items()
                if isinstance(value, float) and not math.isfinite(value)
            }
            self.unwritten[name] = (
                self.unwritten.get(name, b"") + json.dumps(row | infinite).encode() + b"\n"
            )
        with open(
            self.out / name, "ab", buffering=0
        ) as file:  # opened for each: what is logged is on its way to disk
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(self.unwritten[name]) < len(self.unwritten[name]):
                    raise OSError("no room for a whole row")
                del self.unwritten[name]
            except OSError as error:
                file.truncate(size)
                self.say(f"cannot write {self.out / name} now: {error}")

    def row(self, **values) -> None:
        self.write("metrics.jsonl", [values])

    def say(self, line: str, step: int | None = None) -> None:
        if self.first:
            print(
                line
                if step is None
                else f"step {step:>{len(str(self.steps))}}/{self.steps}  {line}",
                flush=True,
            )

    def training(self, step: int, row: dict) -> None:
        self.row(step=step, **row)
        minutes, seconds = divmod((self.steps - step) * row["step_time"], 60)
        mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
        self.say(
            f"{step / self.steps:4.0%}  loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
            f"{row['step_time'] * 1e3:,.0f} ms  {row['tokens_per_second']:,.0f} tok/s{mfu}  "
            f"{minutes:.0f}m{seconds:02.0f}s left",
            step,
        )


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    work = path.with_name(f".{path.name}.tmp")
    work.write_text(text)
    os.replace(work, path)


# ---------------------------------------------------------------------------------------------------------------
# The run


class Run:
    """What a step needs, put together from the ground floor. `finished` is True where there is nothing left to do."""

    def __init__(self, config: Config, world: dist.World, dog: watchdog.Watchdog):
        self.watchdog = dog
        self.config = c = config
        self.world, self.device = world, world.device
        self.dtype = dist.fast_dtype(self.device) if c.dtype == "auto" else getattr(torch, c.dtype)
        self.strategy, self.why = (
            (c.strategy, "as asked") if c.strategy != "auto" else self.choose_strategy()
        )
        self.shape = dist.mesh_shape(
            self.strategy, world.size, world.local_size, c.dp_replicate, c.dp_shard, c.tp
        )
        self.ranks = math.prod(self.shape[:2])  # that read different data
        self.micro, self.accumulation = batch_shape(c, self.ranks)
        profile_window(c)
        dist.wrap_units(
            [], [], c.wrap
        )  # these three: what does not fit is refused before any data are prepared
        model_config(c, vocab_size=1)
        if c.grad_sync == "shard" and self.strategy != "hsdp":
            raise UsageError(
                f"--grad_sync shard is for --strategy hsdp, not {self.strategy}: use batch or micro_batch"
            )
        if c.data == BUILTIN:
            prepare_builtin(world)
        folder = data.open_folder(Path(c.data))
        self.model_config = model_config(c, folder.vocab_size)
        self.seq_len = self.model_config.seq_len
        self.train_windows = data.TokenDataset(folder, "train", self.seq_len, c.seed)
        self.val_windows = data.TokenDataset(folder, "val", self.seq_len, None)
        self.folder = folder
        self.manifest = {
            "config": dataclasses.asdict(c),
            "model": dataclasses.asdict(self.model_config),
            "data": folder.fingerprint,
            "tokenizer": folder.tokenizer,
            "tokens_in_vocabulary": folder.vocab_size,
        }
        newest, self.passed_over = checkpoint.latest_valid(Path(c.out))
        self.path, self.step = dist.on_first_rank(lambda: starting_point(c, self.manifest, newest))
        self.began, self.finished = self.step, self.step >= c.max_steps
        self.interrupted, self.deadline = False, time.monotonic() + (c.time_limit or math.inf)
        self.data_wait, self.step_time, self.sent, self.unsaved = 0.0, 0.0, None, None

    def choose_strategy(self) -> tuple[str, str]:
        """For --strategy auto, with the vocabulary of the named size: the data need not be there yet."""
        c = self.config
        with torch.device("meta"):
            model = Transformer(
                model_config(c, SIZES[c.model].vocab_size), self.dtype, c.loss_chunks
            )
        micro = c.micro_batch_size or max(1, c.global_batch_size // max(1, self.world.size // c.tp))
        activations = model.activation_bytes(micro, c.activation_checkpointing)
        return dist.on_first_rank(
            lambda: dist.choose_strategy(self.world, model.parameter_count(), activations, c.tp)
        )

    def build(self) -> None:
        """Model, optimizer and state, on the mesh; from here on the run folder is this run's."""
        c = self.config
        self.mesh = dist.make_mesh(self.world, self.shape)
        self.rank = dist.dp_rank(self.mesh)
        with torch.device("meta"):
            self.model = model = Transformer(self.model_config, self.dtype, c.loss_chunks)
        if c.checkpoint == "full":
            dist.on_first_rank(lambda: checkpoint.check_full(model.parameter_count()))
        dist.checkpoint_activations(model.blocks, c.activation_checkpointing)
        if c.compile:
            dist.compile_layers([*model.blocks, model.head])
        self.forward = dist.parallelize(
            model,
            model.tensor_parallel_plan(),
            dist.wrap_units(model.blocks, model.embed_and_head(), c.wrap),
            self.mesh,
            self.strategy,
            self.dtype,
            self.device,
            lambda name, tensor: model.init_tensor(name, tensor, c.seed),
            c.reshard_after_forward,
        )
        lr = 0.5 / self.model_config.d_model if c.lr is None else c.lr
        lr_at = functools.partial(
            optim.learning_rate,
            schedule=c.schedule,
            lr=lr,
            min_lr=c.min_lr,
            warmup_steps=c.warmup_steps,
            max_steps=c.max_steps,
        )
        self.optimizer = optim.Optimizer(
            model.named_parameters(),
            model.decays,
            lr_at,
            weight_decay=c.weight_decay,
            betas=(c.beta1, c.beta2),
            eps=c.eps,
            clip=c.clip,
            max_grad_norm=c.max_grad_norm,
            max_grad_norm_ratio=c.max_grad_norm_ratio,
            skip_spikes=c.skip_spikes,
        )
        self.state = {
            "model": {name: p.detach() for name, p in model.named_parameters()},
            "optimizer": self.optimizer.state(),
        }
        if self.path:
            checkpoint.load(self.path, self.state)
        same = {f"--{name}": value for name, value in self.manifest["config"].items()}
        same |= {"the code": source_hash(), "the data's fingerprint": self.manifest["data"]}
        numbers = data.train_indices(
            range(self.step + 1, self.step + 2),
            c.global_batch_size,
            self.micro,
            self.rank,
            self.ranks,
        )
        watchdog.check_ranks_agree(self.mesh, same, model.parameters(), itertools.chain(*numbers))
        out = Path(c.out)
        if self.world.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            replace_file(out / "config.json", json.dumps(dataclasses.asdict(c), indent=2) + "\n")
        self.watchdog.dump_folder = out / "flight"
        self.log = Log(out, self.step, c.max_steps, self.world.rank == 0)
        self.profiler = profiling.Profiler(
            profile_window(c), out / "profile", self.mesh, self.log.say
        )
        self.saver = checkpoint.Saver(
            out, c.checkpoint, c.async_save, c.keep_last, c.keep_every, self.world.timeout
        )

    def introduce(self) -> None:
        """Say what runs where, with the arithmetic."""
        c, m = self.config, self.model_config
        total, own = (
            self.model.parameter_count(),
            sum(optim.local(p).numel() for p in self.model.parameters()),
        )
        step_tokens = c.global_batch_size * self.seq_len
        epochs = c.max_steps * c.global_batch_size / len(self.train_windows)
        why = " (--dtype auto: what this hardware is fast in)" if c.dtype == "auto" else ""
        for line in (
            f"model   {c.model}: {m.n_layer} layers x {m.d_model} wide, vocabulary {m.vocab_size:,}: {total:,} parameters",
            f"mesh    {self.strategy}: {' x '.join(f'{axis} {size}' for axis, size in zip(dist.AXES, self.shape))} = "
            f"{self.world.size} x {self.device.type} ({dist.device_name(self.device)})",
            *([f"        --strategy auto: {self.why}"] if c.strategy == "auto" else []),
            f"dtype   {str(self.dtype).removeprefix('torch.')}{why}; weights, reductions and optimizer in float32",
            f"batch   {c.global_batch_size} sequences = micro-batch {self.micro} x accumulation {self.accumulation} "
            f"x {self.ranks} ranks; x {self.seq_len} tokens = {step_tokens:,} tokens a step",
            f"data    {c.data}: {len(self.train_windows):,} sequences; {c.max_steps:,} steps read {epochs:.2f} epochs",
            # float32: weight 4 + gradient 4 + AdamW's two moments 8 = 16 bytes
            f"memory  16 bytes x {own:,} parameters on this rank = {16 * own / 1e6:,.1f} MB for training state, and activations",
            *(f"        passed over {problem}" for problem in self.passed_over),
            f"out     {c.out}" + (f", continuing from {self.path}" if self.path else ""),
        ):
            self.log.say(line)

    def fetch(self, windows: data.TokenDataset, numbers: Iterator[list[int]]) -> Iterator[Tensor]:
        """Batches (m, T + 1) on the device."""
        cuda, workers = self.device.type == "cuda", self.config.num_workers
        batches = data.loader(
            windows, numbers, workers if workers is not None else 2 * cuda, pin=cuda
        )
        return data.prefetch(self.timed(batches), self.device) if cuda else self.timed(batches)

    def timed(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            self.at("reading data")
            batch = next(batches, None)
            self.at("computing", slow=self.step == self.began)
            self.data_wait += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def at(self, doing: str, slow: bool = False) -> None:
        """Tell the other ranks how far this one is."""
        self.watchdog.progress(f"after step {self.step}, {doing}", slow)

    def train_step(self, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        """One optimizer step over global_batch_size sequences. Returns 0-d tensors on the device and does not wait for it."""
        loss = torch.zeros((), device=self.device)
        for micro in range(self.accumulation):
            tokens = next(batches)
            with dist.gradient_sync(
                self.forward, self.config.grad_sync, last=micro == self.accumulation - 1
            ):
                # mean over the micro-batch / accumulation: their sum, averaged over ranks, is the mean over the global batch
                part = self.forward(tokens[:, :-1], tokens[:, 1:]) / self.accumulation
                part.backward()
            loss += part.detach()
        self.step += 1
        interval = self.config.optim_metrics_interval
        measure = bool(interval) and self.step % interval == 0
        metrics = self.optimizer.step(self.step, loss, measure)
        return {"loss": loss, **metrics}

    def clocks(self) -> tuple[float, float]:
        """(this rank's own time, in which its thread ran or waited for data, not for other ranks; the data wait in it).

        What a GPU waits for its host does not know: there own time is all time.
        """
        own = (
            time.thread_time() + self.data_wait
            if self.device.type == "cpu"
            else time.perf_counter()
        )
        return own, self.data_wait

    def restart_clocks(self) -> None:
        """From here on the next row of the log counts."""
        self.mark = self.step, dist.Moment(self.device), *self.clocks()

    def send(self, metrics: dict[str, Tensor]) -> None:
        """Start the metrics of all ranks on their way to the host: one small collective and a copy, for which no GPU waits."""
        step, began, own, waited = self.mark
        own_now, waited_now = self.clocks()
        of_rank = {
            "step_time": (own_now - own) / (self.step - step),
            "data_wait": waited_now - waited,
            "peak_device_memory": dist.peak_device_memory(self.device),
            "peak_host_memory": dist.peak_host_memory(),
        }
        values = torch.stack([value.double() for value in metrics.values()])
        values = torch.cat(
            (
                values,
                dist.to_device(
                    torch.tensor(list(of_rank.values()), dtype=torch.float64), self.device
                ),
            )
        )
        ranks = dist.gather(values).to("cpu", non_blocking=True)
        ended = dist.Moment(self.device)
        self.sent = (
            [*metrics, *of_rank],
            ranks,
            self.step,
            self.step - step,
            self.optimizer.lr,
            began,
            ended,
        )
        self.mark = self.step, ended, own_now, waited_now

    def receive(self) -> None:
        """Log the row that is on its way, if one is. Raises Diverged where training no longer makes progress."""
        if self.sent is None:
            return
        (names, ranks, step, steps, lr, began, ended), self.sent = self.sent, None
        ended.wait()
        columns = dict(zip(names, zip(*ranks.tolist())))  # name -> the values of all ranks
        times, skipped, most = (
            columns.pop("step_time"),
            max(columns.pop("skipped_in_a_row")),
            self.config.max_skipped,
        )
        row = {name: max(column) for name, column in columns.items()} | {
            "loss": sum(columns["loss"]) / self.world.size,
            "lr": lr,
        }
        row |= {
            name: int(row[name])
            for name in ("clipped", "skipped_steps", "peak_device_memory", "peak_host_memory")
        }
        row |= {
            "step_time_min": min(times),
            "step_time_max": max(times),
            "slowest_rank": times.index(max(times)),
            "data_wait_min": min(columns["data_wait"]),
        }
        step_tokens, peak = (
            self.config.global_batch_size * self.seq_len,
            dist.peak_flops(self.device, self.dtype),
        )
        row["step_time"] = self.step_time = ended.since(began) / steps
        row["tokens_per_second"] = step_tokens / self.step_time
        row["tokens_per_second_per_device"] = per_device = (
            row["tokens_per_second"] / self.world.size
        )
        row["mfu"] = per_device * self.model.flops_per_token(self.seq_len) / peak if peak else None
        self.log.training(step, {"tokens": step * step_tokens, **row})
        if most and skipped >= most:
            raise Diverged(
                f"{skipped:.0f} updates in a row were skipped up to step {step}, since their gradients were not "
                "finite or spiked: the checkpoints in --out are from before; lower --lr or look at the data"
            )

    def log_parameters(self, table: Tensor) -> None:
        """One row of optim.jsonl for each parameter; waits for the device on rank 0."""
        if self.world.rank == 0:
            names, columns = self.optimizer.parameters, self.optimizer.COLUMNS
            rows = (
                {"step": self.step, "parameter": name, **dict(zip(columns, row))}
                for name, row in zip(names, table.tolist())
            )
            self.log.write("optim.jsonl", rows)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Log the mean loss over the fixed validation set. All ranks take part, since every forward is a collective."""
        count, waited = min(self.config.eval_sequences, len(self.val_windows)), self.data_wait
        lists = list(
            data.val_indices(count, len(self.val_windows), self.micro, self.rank, self.ranks)
        )
        total = torch.zeros(1, device=self.device)
        # A rank that has run out joins the forward with window 0, which weighs nothing.
        for numbers, tokens in zip(
            lists, self.fetch(self.val_windows, (numbers or [0] for numbers in lists))
        ):
            total += self.forward(tokens[:, :-1], tokens[:, 1:]) * len(numbers)
        self.data_wait = waited
        val_loss = (
            dist.gather(total).double().sum().item() / self.config.tp / count
        )  # the ranks of a tp group say the same
        self.log.row(step=self.step, val_loss=val_loss)
        self.log.say(f"val_loss {val_loss:.4f}", self.step)

    def save(self) -> None:
        if self.config.checkpoint == "none":
            return
        self.at("saving", slow=True)
        tokens = self.step * self.config.global_batch_size * self.seq_len
        self.saver.save(self.state, {"step": self.step, "tokens": tokens, **self.manifest})
        self.log_saves()

    def finish_saves(self) -> None:
        """Wait for the save under way. Raises CheckpointError where the last one failed: the run would be lost."""
        self.at("saving", slow=True)
        self.saver.wait()
        self.log_saves()
        if self.unsaved:
            raise checkpoint.CheckpointError(self.unsaved)

    def log_saves(self) -> None:
        """Log the saves that have ended."""
        for row in self.saver.done():
            self.log.row(**row)
            if row["event"] == "checkpoint":
                size, seconds, blocking = (
                    row["bytes"] / 1e6,
                    row["seconds"],
                    row["blocking_seconds"],
                )
                held = "" if blocking == seconds else f", of which training waited {blocking:.2f} s"
                self.log.say(
                    f"saved {row['path']}: {size:,.1f} MB in {seconds:.2f} s{held}", row["step"]
                )
                self.unsaved = None
            else:
                self.unsaved = f"cannot write {row['path']}: {row['error']}"
                self.log.say(
                    f"NOT SAVED: {self.unsaved}; the checkpoints before are whole", row["step"]
                )

    def sample(self) -> str:
        """The first tokens of the validation set, and how the model goes on; a collective like every forward. Text on rank 0."""
        self.at("writing text", slow=True)
        prompt = self.folder.tokens("val")[: max(1, self.seq_len // 4)].tolist()
        tokens = generate(
            self.forward,
            prompt,
            self.config.sample_tokens,
            seq_len=self.seq_len,
            vocab_size=self.folder.vocab_size,
            device=self.device,
            temperature=0.8,
        )
        tokens = prompt + list(tokens)
        try:
            return (
                "".join(tokenizer.decode(self.folder.tokenizer, tokens))
                if self.world.rank == 0
                else ""
            )
        except tokenizer.TokenizerError as error:  # trained all the same
            return f"no text: {error}"

    def interrupt(self, number: int, frame) -> None:
        """A signal: stop after the next step, when all ranks know. A second Ctrl-C ends a run without torchrun at once."""
        self.interrupted = True
        if (
            "RANK" not in os.environ
        ):  # torchrun passes on the one that the terminal has sent already
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def must_stop(self, pause: float) -> bool:
        """Whether this rank has to stop: it got a signal, or the time that is left is what the last things may take twice."""
        return self.interrupted or time.monotonic() > self.deadline - 2 * (self.step_time + pause)


def train(run: Run) -> int:
    """The loop; returns the exit status. The host waits for the device only to evaluate, to save and to end."""
    c, log = run.config, run.log
    numbers = data.train_indices(
        range(run.step + 1, c.max_steps + 1), c.global_batch_size, run.micro, run.rank, run.ranks
    )
    batches = run.fetch(run.train_windows, numbers)
    agreement = watchdog.AnyRankFlag(run.world.timeout)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # Ctrl-C, torchrun and schedulers, Slurm before its limit
        signal.signal(number, run.interrupt)
    first, pause = run.step + 1, 0.0  # the longest that evaluations and checkpoints took
    run.restart_clocks()
    while run.step < c.max_steps:
        with run.profiler.step(run.step + 1, run.data_wait):
            metrics = run.train_step(batches)
        if "parameters" in metrics:
            run.log_parameters(metrics.pop("parameters"))
        run.receive()  # the row before this one, which came while this step was queued
        step, last = run.step, run.step == c.max_steps
        if step % 100 == 0:
            gc.collect(1)  # on all ranks in the same step, so that none waits for another's
        stop = agreement(run.must_stop(pause)) and not last
        evaluates, saves = (
            last or (interval and step % interval == 0)
            for interval in (c.eval_interval, c.save_interval)
        )
        pauses = stop or evaluates or saves
        if not (pauses or step == first or step % c.log_interval == 0):
            continue

        run.send(metrics)
        if pauses or run.device.type == "cpu":  # where it is there already
            run.receive()
        run.log_saves()
        if not pauses:
            continue
        began = time.perf_counter()
        if stop:  # save first: whoever stops a run does not wait long
            run.save()
            run.finish_saves()
        if evaluates:
            run.evaluate()
        if stop:
            log.say(
                f"stopped after step {step}"
                + "; the same command continues" * (c.checkpoint != "none")
            )
            return stopped_status()
        if saves:
            run.save()
        run.restart_clocks()
        pause = max(pause, time.perf_counter() - began)
    run.finish_saves()
    if c.sample_tokens:
        log.say(f"{' sample ':-^80}\n{run.sample()}\n{'-' * 80}")
    return 0


def stopped_status() -> int:
    """75, sysexits' EX_TEMPFAIL: "try again". But 0 under torchrun --max-restarts, which would try again at once."""
    return 0 if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) else 75


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector would stop a rank now and then, and all others with it: the loop collects, on all at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prepare_builtin(world: dist.World) -> None:
    """Make the default token folder: on rank 0, and, where hosts share no disk, on one rank of each other host."""
    for turn in (world.rank, world.local_rank):
        if turn == 0 and not Path(BUILTIN).exists():
            prepare.prepare(None, Path(BUILTIN))
        torch.distributed.barrier()


def main(argv: list[str]) -> int:
    dist.read_slurm()
    try:
        config = parse(argv)
        world = dist.start(config.device, config.timeout)
        dog = watchdog.Watchdog(world.store, world.rank, world.size, config.timeout)
        with (
            dog,
            loss_parallel(),
            no_garbage_collection(),
        ):  # the second is for --tp, whose ranks hold parts of logits
            run, status = Run(config, world, dog), 0
            if not run.finished:
                run.build()
                run.introduce()
                status = train(run)
            elif world.rank == 0:
                print(
                    f"{config.out} is finished, step {run.step} of {config.max_steps}: raise --max_steps, "
                    "or choose another --out"
                )
        dist.stop()
        return status
    except (
        UsageError,
        data.DataError,
        tokenizer.TokenizerError,
        dist.MeshError,
        watchdog.RankMismatch,
    ) as error:
        return fail(str(error), 2)
    except (checkpoint.CheckpointError, Diverged, OSError) as error:
        return fail(str(error), 1)
    except RuntimeError as error:
        if "out of memory" not in str(error) and "allocate memory" not in str(
            error
        ):  # on CUDA, on CPU
            raise
        return fail(
            f"{str(error).splitlines()[0]} Lower --micro_batch_size, or share the weights with --strategy fsdp",
            1,
        )
    except KeyboardInterrupt:
        return 130


def fail(message: str, status: int) -> int:
    """Say what is wrong in one line; returns the exit status.

    Rank 0 speaks first, for all that meet the same error, since torchrun ends the others when one exits; a rank that is
    still there after three seconds has an error of its own.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank:
        time.sleep(3)
    print(
        f"train.py: error{f' on rank {rank}' if rank else ''}: {message}",
        file=sys.stderr,
        flush=True,
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
