"""What `pip install .` says, because the trainer runs from its folder."""

raise SystemExit(
    "nanoshard runs from its folder and cannot be installed. Instead: "
    "pip install -r requirements.txt, then python train.py"
)
