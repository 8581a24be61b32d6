"""Train a Llama with the Trainer of Hugging Face transformers, as a peer in tools.bench.

python tools/measuring/transformers_trainer.py train.bin N_LAYER N_HEAD WIDTH D_FF SEQ_LEN BATCH \
    STEPS DTYPE

Prints the time of each step in nanoGPT's format. Under torchrun the ranks share the batch.
"""

import os
import sys
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Sequences(Dataset):
    """The tokens of a file of uint16, cut into sequences."""

    def __init__(self, path: str, seq_len: int):
        self.tokens = np.memmap(path, np.uint16, "r")
        self.seq_len = seq_len

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, i: int) -> dict:
        start = i * self.seq_len
        tokens = torch.from_numpy(self.tokens[start : start + self.seq_len].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class PrintTimes(TrainerCallback):
    def on_train_begin(self, *_, **__):
        self.ended = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        if state.is_world_process_zero:
            print(f"iter {state.global_step}: time {1e3 * (now - self.ended):.2f}ms", flush=True)
        self.ended = now


def main(path: str, *numbers: str) -> None:
    *sizes, dtype = numbers
    n_layer, n_head, width, d_ff, seq_len, batch, steps = map(int, sizes)
    data = Sequences(path, seq_len)
    config = LlamaConfig(
        vocab_size=1 + int(data.tokens.max()),
        hidden_size=width,
        intermediate_size=d_ff,
        num_hidden_layers=n_layer,
        num_attention_heads=n_head,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch // int(os.environ.get("WORLD_SIZE", 1)),
            use_cpu=not torch.cuda.is_available(),
            bf16=dtype == "bfloat16",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = LlamaForCausalLM(config)
        Trainer(model, arguments, train_dataset=data, callbacks=[PrintTimes()]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
