"""A training loop of one's own: a stock `transformers.Trainer` trains every client in every round.

atlas run --plugin examples/plugins/hf_trainer.py --trainer hf_trainer --preset smoke
"""

from tempfile import TemporaryDirectory

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments

from atlas_fl.plugins import register


@register("trainer", "hf_trainer")
def hf_trainer(training):
    """Train the model of a client in place; the loss that is recorded is the one that the model computes."""
    options = training.options
    sgd = torch.optim.SGD, {"lr": training.lr, "momentum": options.momentum, "nesterov": options.nesterov}
    optimizer = sgd if options.optimizer == "sgd" else (torch.optim.AdamW, {"lr": training.lr})
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,  # nothing is saved: the parameters are read off the model
            save_strategy="no",
            lr_scheduler_type="constant",  # inside a round; the rate of the round follows --schedule
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            weight_decay=options.weight_decay,
            max_grad_norm=options.clip,
            seed=training.seed,
            use_cpu=next(training.model.parameters()).device.type == "cpu",
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = Trainer(
            training.model, arguments, training.collate, training.examples, optimizer_cls_and_kwargs=optimizer
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
