"""What argparse finds, on every command: unknown flags, wrong types and choices."""

from mistakes import Mistake

MISTAKES = {
    "train.py": [
        Mistake("--max_steps ten", "argument --max_steps: invalid int value: 'ten'"),
        Mistake("--max_step 5", "unrecognized arguments: --max_step 5; did you mean --max_steps?"),
        Mistake("--tracker comet", "argument --tracker: invalid choice: 'comet'"),
    ],
    "prepare.py": [
        Mistake("--source {text}/a", "the following arguments are required: --out"),
        Mistake("--out {root}/new --soruce x", "--soruce x; did you mean --source?"),
        Mistake("--out {root}/new --pattern gpt4", "argument --pattern: invalid choice: 'gpt4'"),
    ],
    "sample.py": [
        Mistake("", "the following arguments are required: --run"),
        Mistake("--run {other} --promt x", "--promt x; did you mean --prompt?"),
    ],
    "tools.checkpoint": [
        Mistake("", "the following arguments are required: command (tools.checkpoint --help"),
        Mistake("lst {other}", "invalid choice: 'lst'"),
        Mistake("consolidate {other}", "the following arguments are required: OUT"),
    ],
    "tools.compare": [
        Mistake("", "the following arguments are required: RUN"),
        Mistake("--los=2 {other}", "unrecognized arguments: --los=2; did you mean --loss?"),
        Mistake("--loss low {other}", "argument --loss: invalid positive_number value: 'low'"),
    ],
    "tools.bench": [
        Mistake("", "the following arguments are required: TABLE"),
        Mistake("nanogpt --path=a --round 2", "unrecognized arguments: --round 2"),
        Mistake("strategies --rounds 0", "argument --rounds: 0 must be at least 1 and"),
        Mistake("strategies --model huge", "argument --model: invalid choice: 'huge' (choose"),
        Mistake("nanogpt", "the following arguments are required: --path"),
    ],
    "tools.check": [
        Mistake("--ranks 0", "argument --ranks: 0 must be at least 1 and"),
        Mistake("--rank=2", "unrecognized arguments: --rank=2; did you mean --ranks?"),
    ],
    "tools.hf": [
        Mistake("", "the following arguments are required: command"),
        Mistake("exprot {other} {root}/new", "invalid choice: 'exprot'"),
        Mistake("export {other}", "the following arguments are required: OUT"),
    ],
    "tools.plan": [
        Mistake("--world_sise 8", "--world_sise 8; did you mean --world_size?"),
        Mistake("--world_size 0", "argument --world_size: 0 must be at least 1"),
    ],
}
