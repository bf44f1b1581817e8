"""QDeepSeek's program: load, cover, fine-tune with INT4 in the loop, export, reload, evaluate, report.

    python train.py                                   # the embedded default, a few minutes on a CPU
    python train.py model=deepseek_v2_lite data=sft data.path=chats.jsonl quant=w4a16_g32
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from qdeepseek.train.loggers import build_logger
from qdeepseek.train.callbacks.balance import LossFreeBalance
from qdeepseek.train.pretrain import pretrain


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    config = OmegaConf.to_container(cfg, resolve=True)
    folder = Path(config["run_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    logger = build_logger(config["logger"], folder)
    callbacks = [LossFreeBalance(config["method"]["balance_speed"])] if config["method"]["balance_speed"] else []
    pretrain(config, folder, strategy=config["strategy"]["name"], logger=logger, callbacks=callbacks)


if __name__ == "__main__":
    main()
