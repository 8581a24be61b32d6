"""What the tools refuse."""

from pathlib import Path

from mistakes import Mistake

MISTAKES = {
    "tools.compare": [
        Mistake("--loss nan {other}", "argument --loss: nan must be above 0 and finite"),
        Mistake("{other} {root}/nowhere", "nowhere has no config.json: it is not the folder of a"),
        Mistake("{foreign}", "foreign has no metrics.jsonl: it is not the folder of a started run"),
        Mistake("{unlogged}", "unlogged has no training row yet: let it run until its first one"),
    ],
    "tools.report": [
        Mistake("{other} --out {root}/nowhere/page.html", "nowhere/page.html'", status=1),
        Mistake("{unlogged} --follow", "unlogged has no training row yet: let it run until its"),
    ],
    "tools.bench": [
        Mistake("strategies --nproc 1 --only hsdp", "no strategy is left: hsdp takes an even"),
        Mistake("nanogpt --path {root}", "no nanoGPT with data/shakespeare_char/train.bin there"),
    ],
    "tools.check": [
        Mistake("--device cuda", "PyTorch finds no CUDA device here; use --device cpu"),
        Mistake("--json {root}/nowhere/check.json", "check.json: there is no folder "),
    ],
    "tools.plan": [
        Mistake("", "--world_size is missing: give the number of devices in all"),
        Mistake("--world_size 12", "--world_size 12 is not a multiple of --nproc_per_node 8"),
        Mistake("--run {restarted}", "restarted has no training row of its last start yet"),
        Mistake("--run {winged}", "winged was trained by other code: "),
        Mistake("--run {other} --tp=2", "--run takes the flags of the run: leave out --tp"),
        Mistake("--world_size 8 --achieved 0", "--achieved: 0 must be above 0 and finite"),
        Mistake("--world_size 8 --dtype float32", "the speed of --device_type h100 with --dtype f"),
        Mistake("--world_size 8 --data {root}/nowhere", "no train.bin there; create it with"),
        Mistake("--world_size 8 --tp 3", "n_kv_head 4 / tp 3 = 1.33, but each rank of a tp group"),
    ],
}


def write_folders(root: Path) -> None:
    """Copies of a run of two steps whose logs or flags are spoilt in one way each."""
    config = (root / "other/config.json").read_text()
    lines = (root / "other/metrics.jsonl").read_text().splitlines()
    training = [line for line in lines if '"loss"' in line]
    spoilt = {
        "unlogged": ([], config, 0),
        "listed": (lines, "[]", 0),
        "unsaved": (training, '{"checkpoint": "none"}', 0),
        "winged": (training, '{"wings": 2}', 0),
        "restarted": (training, config, 2),
    }
    for name, (log, config, step) in spoilt.items():
        (root / name).mkdir()
        (root / name / "metrics.jsonl").write_text("\n".join(log))
        (root / name / "config.json").write_text(config)
        start = f'{{"time": "", "step": {step}, "config": {config}}}'
        (root / name / "starts.jsonl").write_text(start.replace("\n", " "))
