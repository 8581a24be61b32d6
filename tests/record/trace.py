"""Which functions of this project does a reader meet, before step 1 and in a logged step?

python tests/record/trace.py 2 --strategy fsdp

Runs train.py with these flags on two ranks for a few steps, on tokens of its own, and prints the
functions that rank 0 enters before step 1 and in step 3, in which nothing is new. Only the main
thread is traced. Lambdas, comprehensions, class bodies and generated functions, such as a dataclass
has, do not count.
"""

import inspect
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from golden import write_tokens

ROOT = Path(__file__).resolve().parent.parent.parent
TRACED_STEP = 3
FLAGS = f"--log_interval 1 --sample_tokens 0 --max_steps {TRACED_STEP + 2} --warmup_steps 1"


class Trace:
    """entered[n]: the functions entered in step n, from one call of train_step to the next."""

    def __init__(self):
        self.entered: list[set[str]] = [set()]

    def see(self, frame, event: str, _) -> None:
        """The function for sys.setprofile."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        file = Path(code.co_filename).relative_to(ROOT)
        if file.parts[0] == "tests" or ".." in code.co_filename:
            return
        if (str(file), code.co_name) == ("train.py", "train_step"):
            self.entered.append(set())
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            self.entered[-1].add(f"{file}:{code.co_firstlineno} {code.co_name}")


def trace_rank(argv: list[str]) -> None:
    """Run train.py on this rank; on rank 0, print the functions."""
    sys.path.insert(0, str(ROOT))
    sys.argv = ["train.py", *argv]
    trace = Trace()
    is_rank0 = os.environ["RANK"] == "0"
    if is_rank0:
        sys.setprofile(trace.see)
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        sys.setprofile(None)
    if is_rank0 and not status:
        for name, step in (("before step 1", 0), (f"in step {TRACED_STEP}", TRACED_STEP)):
            functions = sorted(trace.entered[step])
            print(f"{len(functions)} functions {name}:", *functions, sep="\n  ")
    sys.exit(status)


def main(ranks: str, *argv: str) -> int:
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        write_tokens(Path(folder) / "tokens")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", ranks, __file__, *FLAGS.split()]
        command += ["--data", f"{folder}/tokens", "--out", f"{folder}/run", *argv]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        trace_rank(sys.argv[1:])
    sys.exit(main(*sys.argv[1:]))
