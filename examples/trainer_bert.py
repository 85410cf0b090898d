"""Fine-tuning with the Trainer of transformers, which decides by itself whether to compile.

    pip install "compile-advisor[transformers]"
    python examples/trainer_bert.py --steps 2000

The whole change is `callbacks=[AdviseCallback()]`. It times some eager steps, compiles the model in
place if that is expected to pay for the steps that are left, lets compiled and eager steps take
turns until it is clear which are faster, and keeps those. Losses and checkpoints are those of a
training without it: resume with `trainer.train(resume_from_checkpoint=True)`, with or without the
callback. A short run like this one stays eager; `--always-try` compiles in any case.

Decided already, by `advise run`? `AdviseCallback(config=advice.config)` considers that one only,
and `TrainingArguments(**training_arguments(advice))` compiles without a callback. With
`AdviseCallback(workload="examples/ner_bert.py:build")` the trials run before the first step.
Sentences of varying lengths: give the Trainer `PadToBoundary` (advisor/buckets.py) as its collator.
"""

import argparse
import tempfile

from docstring_task import bert, samples
from transformers import Trainer, TrainerCallback, TrainingArguments

from advisor.integrations.transformers import AdviseCallback


def trainer(
    folder: str, steps: int, callbacks: list[TrainerCallback], **arguments: object
) -> Trainer:
    """Returns a Trainer as anyone would make it."""
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-4,
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **arguments,
    }
    return Trainer(
        model=bert(),
        args=TrainingArguments(**settings),
        train_dataset=samples(),
        callbacks=callbacks,
    )


def main() -> None:
    """Trains, and prints what was decided and saved."""
    parser = argparse.ArgumentParser(description="Fine-tunes a tiny BERT with AdviseCallback.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--always-try", action="store_true", help="compile and measure in any case")
    options = parser.parse_args()
    advise = AdviseCallback(always_try=options.always_try)  # prints its report at the end
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder, options.steps, [advise]).train()


if __name__ == "__main__":
    main()
