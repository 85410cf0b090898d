"""Several ranks by Accelerate, compiled by its configuration: what it wraps and compiles, and when.

    accelerate launch --config_file examples/accelerate_ddp.yaml examples/accelerate_ranks.py
    accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/accelerate_ranks.py

Those are for GPUs. On CPUs `accelerate launch` needs MPI; torch's launcher does without:

    ACCELERATE_USE_CPU=true ACCELERATE_DYNAMO_BACKEND=inductor \\
        torchrun --nproc_per_node 2 --master_addr 127.0.0.1 examples/accelerate_ranks.py

There Accelerate knows DDP only. It compiles after it has wrapped for DDP and FSDP1, and before
`fully_shard` for FSDP2: which order works, `advise run --ranks 2 --wrap ...` has in its table
(`wrap-first`, `compile-first`; docs/ranks.md). The model is that of examples/ranks.py.
"""

import argparse

import torch
from accelerate import Accelerator
from ranks import BATCH, LENGTH, VOCABULARY, Transformer, loss
from torch._dynamo.utils import counters


def main() -> None:
    """Trains a few steps and prints, on each rank, the loss and how many graphs were compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, VOCABULARY, (options.steps * BATCH * 4, LENGTH + 1))
    loader = torch.utils.data.DataLoader(tokens, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        if step == options.steps:
            break
        optimizer.zero_grad()
        value = loss(model, batch)
        accelerator.backward(value)
        optimizer.step()
    graphs = counters["stats"]["unique_graphs"]
    place = f"rank {accelerator.process_index} of {accelerator.num_processes}"
    kind = accelerator.distributed_type.value
    print(f"{place}: {kind}, loss {value:.4f}, {graphs} graphs", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
