"""Flags that a command does not know or cannot use, alone, together, or on these ranks."""

from pathlib import Path

from mistakes import Mistake

MISTAKES = {
    "train.py": [
        # Found by argparse, as in every command
        Mistake("--max_steps ten", "argument --max_steps: invalid int value: 'ten'"),
        Mistake("--max_step 5", "unrecognized arguments: --max_step 5; did you mean --max_steps?"),
        Mistake("--tracker comet", "argument --tracker: invalid choice: 'comet'"),
        Mistake("--max_steps 0", "argument --max_steps: 0 must be at least 1 and finite"),
        Mistake("--lr nan", "argument --lr: nan must be at least 0 and finite"),
        Mistake("--n_layer 1000000", "--n_layer: 1000000 must be at least 1 and below 10000"),
        # In a file of flags
        Mistake("--config {root}/nothing.json", "--config {root}/nothing.json: [Errno 2] No such"),
        Mistake("--config {configs}/comma", "comma: Expecting property name enclosed in double"),
        Mistake("--config {configs}/nested", "nested: it is not a JSON object of flags other th"),
        Mistake("--config {foreign}/config.json", "unrecognized arguments: --architectures"),
        # One value
        Mistake("--profile 2:2", "--profile 2:2: give START:STOP with START < STOP < max_steps 4"),
        Mistake("--wrap blocks", "--wrap blocks: choose "),
        Mistake("--device cuda", "PyTorch finds no CUDA device here"),
        # Two that do not fit together
        Mistake("--d_model 30", "d_model 30 / n_head 4 must be a whole, even number"),
        Mistake("--n_kv_head 3", "n_head 4 must be a multiple of n_kv_head 3"),
        Mistake("--warmup_steps 5", "--warmup_steps 5 is more than --max_steps 4"),
        Mistake("--min_lr 0.1", "--min_lr 0.1 is above the peak learning rate 0.003"),
        Mistake("--global_batch_size 6 --micro_batch_size 4", "6 is not a multiple of micro_batch"),
        Mistake("--grad_sync shard", "--grad_sync shard is for --strategy hsdp, not single"),
        Mistake("--strategy fsdp --dp_replicate 2", "--strategy fsdp sets dp_replicate and"),
        Mistake("--tp 4", "n_kv_head 2 / tp 4 = 0.5, but each rank of a tp group needs a whole"),
        Mistake("--tp 2", "takes 2 processes, but 1 were started: change --strategy"),
        Mistake("--strategy single", "takes 1 processes, but 2 were started", ranks=2),
    ],
    "prepare.py": [
        Mistake("--source {text}/a", "the following arguments are required: --out"),
    ],
    "sample.py": [
        Mistake("--run {other} --promt x", "--promt x; did you mean --prompt?"),
    ],
    "tools.checkpoint": [
        Mistake("", "the following arguments are required: command (tools.checkpoint --help"),
        Mistake("consolidate {other}", "the following arguments are required: OUT"),
    ],
    "tools.compare": [
        Mistake("--los=2 {other}", "unrecognized arguments: --los=2; did you mean --loss?"),
    ],
    "tools.bench": [
        Mistake("", "the following arguments are required: TABLE"),
        Mistake("strategies --model huge", "argument --model: invalid choice: 'huge' (choose"),
    ],
    "tools.check": [
        Mistake("--jsn=2", "unrecognized arguments: --jsn=2; did you mean --json?"),
    ],
    "tools.hf": [
        Mistake("exprot {other} {root}/new", "invalid choice: 'exprot'"),
    ],
    "tools.plan": [
        Mistake("--world_sise 8", "--world_sise 8; did you mean --world_size?"),
    ],
}


def write_folders(root: Path) -> None:
    """Files for --config that cannot be used."""
    folder = root / "configs"
    folder.mkdir()
    (folder / "comma").write_text('{"lr": 0.5,\n}')
    (folder / "nested").write_text('{"config": "other.json"}')
