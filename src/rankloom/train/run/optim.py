"""The optimizer and its learning rate. The rate is a function of the step, so there is no scheduler state to save.

The optimizers are those of torch.optim, fused where the device has it.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn import Parameter

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.train.run.schema import Config, Optimizer

BETAS = (0.9, 0.95)
MOMENTUM = 0.9
MIN_LR_RATIO = 0.1
FUSED_DEVICES = ("cpu", "cuda")


def learning_rate(step: int, *, peak: float, warmup_steps: int, steps: int, decay: str = "cosine",
                  min_ratio: float = MIN_LR_RATIO) -> float:
    """The rate of the 0-based `step` of a run of `steps` steps.

    Warm-up rises in equal parts and reaches the peak in its last step; its first step is above 0. Decay starts in
    the step after it and reaches `min_ratio` x peak in the last step of the run; later steps stay there.

    >>> [learning_rate(s, peak=1.0, warmup_steps=2, steps=4, decay="linear", min_ratio=0.0) for s in range(5)]
    [0.5, 1.0, 0.5, 0.0, 0.0]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps + 1) / max(1, steps - warmup_steps))
    shapes = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    if decay not in shapes:
        raise ConfigError(f"no decay {decay!r}. {did_you_mean(decay, shapes)}")
    return peak * (min_ratio + (1 - min_ratio) * shapes[decay])


def scale_learning_rate(lr: float, batch: int, base_batch: int, rule: str) -> float:
    """The rate for `batch` rows per step when `lr` was found with `base_batch` rows.

    source: linear: Goyal et al. 2017; sqrt: Krizhevsky 2014, Malladi et al. 2022 (for Adam)

    >>> scale_learning_rate(0.1, 64, 16, "linear"), scale_learning_rate(0.1, 64, 16, "sqrt")
    (0.4, 0.2)
    """
    factors = {"none": 1.0, "linear": batch / base_batch, "sqrt": math.sqrt(batch / base_batch)}
    if rule not in factors:
        raise ConfigError(f"no learning-rate scaling {rule!r}. {did_you_mean(rule, factors)}")
    return lr * factors[rule]


def build_optimizer(config: Optimizer, params: Iterable[Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD over `params`. Weight decay is for those of two dims or more, not for gains and biases."""
    params = list(params)
    groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in params)
    if config.name == "sgd":
        momentum = MOMENTUM if config.momentum is None else config.momentum
        return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas or BETAS, fused=fused)


def schedule(config: Config) -> Callable[[int], float]:
    """The learning rate of each 0-based step of the run that `config` describes."""
    optimizer, shape = config.optimizer, config.schedule
    batch = config.batch().global_
    peak = scale_learning_rate(optimizer.lr, batch, optimizer.base_batch_size or batch, optimizer.lr_scaling)
    floor = MIN_LR_RATIO if shape.min_lr_ratio is None else shape.min_lr_ratio
    return partial(learning_rate, peak=peak, warmup_steps=shape.warmup_steps, steps=config.train.steps, decay=shape.decay, min_ratio=floor)
