"""Train a small model from scratch and write it as an ordinary `save_pretrained` folder with its provenance."""

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from qdeepseek.train import strategy as strategies
from qdeepseek.train.callbacks.balance import LossFreeBalance
from qdeepseek.train.callbacks.same_config import SameConfig
from qdeepseek.train.config import ConfigError, MethodConfig, OptimConfig, build
from qdeepseek.train.data import DataConfig, build_data
from qdeepseek.train.loggers import LoggerConfig, loggers, wandb_logger
from qdeepseek.train.methods import split
from qdeepseek.train.models import ModelConfig, load_model, load_tokenizer
from qdeepseek.train.module import FineTune
from qdeepseek.train.provenance import git_commit
from qdeepseek.train.run import TrainerConfig, build_trainer, fit
from qdeepseek.train.stop import StopRequest
from qdeepseek.train.streaming import check_streams
from qdeepseek.train.tracking import tracking
from qdeepseek.train.zero import ZeroConfig


def pretrain(config: dict[str, Any], folder: Path, stop: StopRequest | None = None) -> Path:
    """Run `experiment=pretrain_tiny` until `stop`; returns the folder with the model, {folder}/model."""
    strategy = strategies.parse(config)
    if isinstance(strategy, ZeroConfig) and strategy.stage == 3:
        raise ConfigError(f"strategy {strategy.name}: job=pretrain writes whole weights at its end; use zero2 or ddp")
    L.seed_everything(config["seed"], verbose=False)
    model_config = build(ModelConfig, config["model"], "model")
    check_streams(model_config.expert_chunks, "job=pretrain trains whole models")
    trainer_config = build(TrainerConfig, config["trainer"], "trainer")
    data_config = DataConfig.parse(config["data"])
    tokenizer = load_tokenizer(model_config)
    model = load_model(model_config)
    data = build_data(data_config, tokenizer, model.config, config["seed"])
    module = FineTune(model, build(OptimConfig, config["optim"], "optim"), trainer_config.steps, stage="pretrain")
    speed = build(MethodConfig, split(config["method"])[0], "method").balance_speed
    balance = [LossFreeBalance(speed)] if speed else []
    logger_config = build(LoggerConfig, config["logger"], "logger")
    wandb = wandb_logger(logger_config, folder, config, stop)
    trainer = build_trainer(
        trainer_config,
        folder,
        "pretrain",
        strategy=strategies.make(strategy, trainer_config.precision),
        logger=loggers(folder, "pretrain", wandb),
        callbacks=[SameConfig(config), *balance, *tracking(logger_config, wandb, [])],
        stop=stop,
    )
    loaders = data.module()
    start = time.perf_counter()
    fit(trainer, module, loaders, folder, "pretrain")
    seconds = time.perf_counter() - start
    held_out = trainer.validate(module, loaders, verbose=False)[0]["pretrain/select_loss"]
    destination = folder / "model"
    if trainer.is_global_zero:
        model.bfloat16()
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.data = parameter.data.float()
        model.save_pretrained(destination)
        tokenizer.save_pretrained(destination)
        tokens = trainer_config.steps * trainer_config.accumulate * data_config.loader.batch_size * data.length
        tokens *= trainer.world_size
        parameters = sum(p.numel() for p in model.parameters())
        facts = {
            "parameters": parameters, "tokens": tokens, "tokens_per_parameter": tokens / parameters,
            "select_loss": held_out, "seed": config["seed"], "commit": git_commit(), "corpus": data.facts,
            "seconds_of_last_session": seconds, "torch": torch.__version__,
        }  # fmt: skip
        (destination / "pretraining.json").write_text(json.dumps(facts, indent=2) + "\n")
    return destination
