"""Groups of training methods: off is nothing, a wrong value is an error that names the group."""

from dataclasses import replace

import pytest
from lightning.pytorch.callbacks import Callback

from qdeepseek.train import methods, qat
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.qat import Run
from tests.train.test_config import composed


def test_every_group_but_the_guard_is_off_by_default():
    config = composed("run_dir=x")
    assert [g for g in methods.GROUPS if config["method"][g]] == ["guard"]
    assert set(Run.from_config(config).methods) == {"guard"}
    assert Run.from_config(composed("run_dir=x", "method/guard=off")).methods == {}


def test_a_group_without_a_class_is_refused():
    with pytest.raises(ConfigError, match=r"method.guard .*chosen by name, as in method/guard=off"):
        methods.build_methods({"guard": {"patience": 3}})


def test_an_unknown_key_names_the_group():
    with pytest.raises(ConfigError, match=r"method.guard.*nonsense"):
        methods.build_methods(
            {"guard": {"_target_": "qdeepseek.train.callbacks.balance.LossFreeBalance", "nonsense": 1}}
        )


def test_order_and_hooks():
    calls = []

    class Part:
        def __init__(self, name):
            self.name = name

        def attach(self, run, student):
            calls.append(("attach", self.name))

        def finish(self, run, student):
            calls.append(("finish", self.name))

        def check(self, run, model):
            calls.append(("check", self.name))

        def optim(self, config):
            return replace(config, lr=config.lr / 2)

        @property
        def unquantised(self):
            return self.name == "lora"

    parts = {"lora": Part("lora"), "guard": Part("guard"), "routing": Callback()}
    methods.attach(parts, None, None)
    methods.finish(parts, None, None)
    methods.check(parts, None, None)
    assert methods.unquantised(parts) == {"lora": parts["lora"]}
    assert methods.optim(parts, OptimConfig(lr=1.0)).lr == 0.25
    assert [c for c in calls if c[0] == "check"] == [("check", "lora"), ("check", "guard")]
    assert calls[:4] == [("attach", "lora"), ("attach", "guard"), ("finish", "guard"), ("finish", "lora")]
    assert methods.callbacks(parts) == [parts["routing"]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method/compensation=lsq", "quant.schemes.main.method.learned=false"], "recipe w4a16_g32 learns no scale"),
        (
            ["method/compensation=seed", "quant.rules.experts.scheme=null"],
            "leaves model.layers.1.mlp.experts",
        ),
        (["method/lora=default", "method/routing=entropy"], "change router weights, which method.lora freezes"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(overrides, message):
    config = composed("run_dir=x", "quant.min_expert_share=0", *overrides)
    with pytest.raises(ConfigError, match=message):
        qat.check(Run.from_config(config))
