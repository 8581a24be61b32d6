"""Flags of train.py that do not fit together, the machine, or the ranks; files of --config."""

from pathlib import Path

from mistakes import Mistake

MISTAKES = {
    "train.py": [
        Mistake("--max_steps 0", "argument --max_steps: 0 must be at least 1 and finite"),
        Mistake("--lr nan", "argument --lr: nan must be at least 0 and finite"),
        Mistake("--n_layer 1000000", "--n_layer: 1000000 must be at least 1 and below 10000"),
        Mistake("--n_layer 1.5", "argument --n_layer: invalid int value: '1.5'"),
        Mistake("--d_model 30", "d_model 30 / n_head 4 must be a whole, even number"),
        Mistake(
            "--profile 2:2",
            "--profile 2:2: give START:STOP with START < STOP < max_steps 4, like 10:13",
        ),
        Mistake(
            "--wrap blocks",
            "--wrap blocks: choose auto, block, block_group:K (K blocks at a time) or none",
        ),
        Mistake("--grad_sync shard", "--grad_sync shard is for --strategy hsdp, not single"),
        Mistake(
            "--tp 4", "n_kv_head 2 / tp 4 = 0.5, but each rank of a tp group needs a whole number"
        ),
        Mistake(
            "--tp 2",
            "takes 2 processes, but 1 were started: change --strategy",
        ),
        Mistake("--n_kv_head 3", "n_head 4 must be a multiple of n_kv_head 3"),
        Mistake(
            "--global_batch_size 6 --micro_batch_size 4",
            "6 is not a multiple of micro_batch_size 4 x 1",
        ),
        Mistake("--strategy fsdp --dp_replicate 2", "--strategy fsdp sets dp_replicate and"),
        Mistake(
            "--strategy hsdp --dp_shard 2",
            "dp_replicate 0 x dp_shard 2 x tp 1 takes 0 processes, but 1",
        ),
        Mistake("--device cuda", "PyTorch finds no CUDA device here"),
        Mistake("--config {root}/nothing.json", "--config {root}/nothing.json: [Errno 2] No such"),
        Mistake("--config {listed}/config.json", "config.json: it is not a JSON object of flags"),
        Mistake("--config {configs}/comma", "comma: Expecting property name enclosed in double"),
        Mistake("--config {configs}/nested", "nested: it is not a JSON object of flags other th"),
        Mistake("--config {configs}/list", "invalid int value: '[4]'"),
        Mistake(
            "--config {foreign}/config.json", "config.json: unrecognized arguments: --architectures"
        ),
        Mistake("--lr inf", "argument --lr: inf must be at least 0 and finite"),
        Mistake("--warmup_steps 5", "--warmup_steps 5 is more than --max_steps 4"),
        Mistake("--min_lr 0.1", "--min_lr 0.1 is above the peak learning rate 0.003"),
        Mistake("--strategy single", "takes 1 processes, but 2 were started", ranks=2),
    ],
}


def write_folders(root: Path) -> None:
    """Files for --config that cannot be used."""
    folder = root / "configs"
    folder.mkdir()
    contents = {
        "comma": '{"lr": 0.5,\n}',
        "nested": '{"config": "other.json"}',
        "list": '{"n_layer": [4]}',
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
