"""What does a zeroth-order step along 64 directions of low rank cost over inference on as many sequences?

A transformer of SmolLM2-135M's shape with random weights, 134.5 million parameters, all trained, float32, one thread;
one sequence of 32 tokens on both sides of 64 directions, 128 sequences in passes of 64, the logits of the last token
only. The baseline infers 128 sequences in passes of 64. A step is whole: directions, passes, and the move of the
parameters. Required: at rank 1 at least 0.8, at rank 4 at least 0.65 of inference's throughput, and at most 1.1 of its
memory, which is the peak of resident memory (VmHWM) in a process of its own above what it held before the model.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from benchmarks.results_file import save_results
from benchmarks.timing import Step, interleaved, memory_rise, print_memory_rise
from opusim.training import ZerothOrder

MODULE, NAME = "benchmarks.speed.low_rank_directions", "low_rank_directions"
DIRECTIONS, TOKENS, ROWS, REPEATS = 64, 32, 64, 3
RANKS = {"rank 1": 1, "rank 4": 4}
LIMITS = {"rank 1": 0.8, "rank 4": 0.65}
MEMORY_LIMIT = 1.1


def work_of(*methods: str, directions: int = DIRECTIONS, layers: int = 30) -> dict[str, Step]:
    """Return inference, and steps of each rank, of one model on one sequence; each has run once on two tokens."""
    import transformers  # takes seconds, which the page of tables need not wait for

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(0, 49152, (1, TOKENS))

    def losses(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
        return torch.logsumexp(logits[:, :2], dim=1) - logits[:, 0]

    def inference(tokens: Tensor = tokens) -> None:
        with torch.no_grad():
            for rows in tokens.repeat(2 * directions, 1).split(ROWS):
                losses(rows)

    work: dict[str, Step] = {}
    for method in methods:
        if method == "inference":
            inference(tokens[:, :2])
            work[method] = inference
            continue
        optimizer = ZerothOrder(model, lr=1e-9, directions=directions, rank=RANKS[method], rows_at_once=ROWS)
        optimizer.measure(losses, tokens[:, :2])
        optimizer.zero_grad()
        work[method] = lambda step=optimizer.step: step(losses, tokens)
    return work


def print_memory(method: str) -> None:
    """Print by how much one turn raises memory, the model included."""
    once = work_of(method, directions=1, layers=1)[method]  # imports and compiles
    print_memory_rise(once, lambda: work_of(method)[method])


def main() -> None:
    torch.set_num_threads(1)
    methods = ("inference", *RANKS)
    memory = {method: memory_rise(MODULE, method) for method in methods}
    seconds = interleaved(work_of(*methods), repeats=REPEATS, warm_up=0, clock=time.process_time)
    rows = []
    for method in methods:
        throughput = seconds["inference"] / seconds[method]
        share = memory[method] / memory["inference"]
        entry = {"work": method, "seconds": seconds[method], "throughput": throughput}
        rows.append({**entry, "memory_mib": memory[method], "memory_ratio": share})
        print(rows[-1], flush=True)
    facts = {"threads": 1, "repeats": REPEATS, "directions": DIRECTIONS, "tokens": TOKENS}
    facts["rows_at_once"] = ROWS
    limits = ", ".join(f"{name}: throughput >= {limit}" for name, limit in LIMITS.items())
    save_results(NAME, {**facts, "limit": f"{limits}, memory_ratio <= {MEMORY_LIMIT}", "rows": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print_memory(sys.argv[2])
    else:
        main()
