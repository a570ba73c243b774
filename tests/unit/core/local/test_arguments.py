"""What is public, and what users pass in: options, classes, groups."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, AdamW

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.local.arguments import (
    check_class,
    check_flags,
    check_in_one_group,
    check_known,
    check_params,
    group_by_options,
    is_process_group,
)

OURS = {
    *(
        "attach",
        "detach",
        "needs_hook",
        "accumulate",
        "clip_grad_norm_",
        "clip_grad_value_",
        "full_grad",
        "owned_gradients",
    ),
    *("last_step", "stage", "explain"),
    *("stats", "check_agreement"),
    *("loss_scale", "scale", "master_weights", "refresh_master_weights"),
    *("overlap_phase", "reset", "finish_sync"),
    *("sharded_state_dict", "load_sharded_state_dict", "state"),
    *("offload_state", "reload_state"),
    *("shard_group", "owner_of"),
    *("rank", "global_rank", "world_size", "process_group"),  # which torch's has as attributes
}
"""Public names of the optimizer besides those of torch's ZeroRedundancyOptimizer. A new name needs documentation."""


def test_public_names_of_the_optimizer_are_torchs_and_the_documented_ones() -> None:
    public = {name for name in dir(ZeroRedundancyOptimizer) if not name.startswith("_")}
    assert public - set(dir(TorchZero)) == OURS
    assert {name for name in dir(TorchZero) if not name.startswith("_")} <= public


def test_shard_optimizer_spells_out_every_option_of_the_class_with_its_default() -> None:
    own = inspect.signature(ZeroRedundancyOptimizer).parameters
    spelt = inspect.signature(shard_optimizer).parameters
    otherwise = {"params", "optimizer_class", "process_group", "overlap_with_ddp", "parameters_as_bucket_view"}
    for name in own.keys() - otherwise:
        default = "auto" if name == "partition" else own[name].default
        assert (spelt[name].default, spelt[name].annotation) == (default, own[name].annotation), name
        if name != "defaults":
            assert spelt[name].kind is inspect.Parameter.KEYWORD_ONLY


def _takes_any(params: Any, **options: Any) -> AdamW:
    return AdamW(params, **options)


@pytest.mark.parametrize(
    ("option", "build", "meant"),
    [
        ("max_grad_nrom", AdamW, "max_grad_norm"),
        ("loss_scal", SGD, "loss_scale"),
        ("master_weight", AdamW, "master_weights"),
        ("momentumm", SGD, None),  # nearest to the class's own, which says so itself
        ("momentum", SGD, None),
        ("max_grad", AdamW, "max_grad_norm"),
        ("nope", AdamW, None),
        ("max_grad_nrom", _takes_any, None),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest_of_the_librarys(option: str, build: Any, meant: Any) -> None:
    library = ["max_grad_norm", "norm_type", "loss_scale", "master_weights"]
    if meant is None:
        check_known([option], build, library)
        return
    told = f"Expected an option of ddp_zero or of {build.__name__}, got {option!r}. Did you mean {meant!r}?"
    with pytest.raises(TypeError, match=re.escape(told)):
        check_known([option], build, library)


def test_groups_by_a_function_keep_order_names_and_values_of_any_kind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    rate = torch.tensor(0.1)
    asked = []

    def options_of(name: str, param: nn.Parameter) -> dict[str, Any] | None:
        asked.append(name)
        if name == "2.weight":
            return {"lr": rate}
        if name == "0.weight":
            return {"lr": rate, "betas": (0.5, 0.5)}
        return {} if name == "1.weight" else None if param.ndim > 1 else {"weight_decay": 0.0}

    groups = group_by_options([(f"module.{name}", param) for name, param in model.named_parameters()], options_of)
    assert asked == [name for name, _ in model.named_parameters()]
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [
        ["module.0.weight"],
        ["module.0.bias", "module.1.bias", "module.2.bias"],
        ["module.1.weight"],
        ["module.2.weight"],
    ]
    assert [sorted(group.keys() - {"params"}) for group in groups] == [["betas", "lr"], ["weight_decay"], [], ["lr"]]
    assert groups[0]["lr"] is rate
    AdamW(groups)


def _answer(value: Any) -> Any:
    return lambda name, param: value


@pytest.mark.parametrize("answer", [0.1, "decay", ["lr"], {"params": []}, True, False])
def test_a_function_that_returns_no_options_is_refused_with_the_name(answer: Any) -> None:
    named = [("module.weight", nn.Parameter(torch.ones(2)))]
    with pytest.raises(TypeError, match="options for the group of 'weight', or None for the class's own, got"):
        group_by_options(named, _answer(answer))


def test_check_class_and_check_params_refuse_other_arguments() -> None:
    weight = nn.Parameter(torch.ones(2))
    for wrong in (AdamW([weight]), nn.Linear, 3, None, "AdamW"):
        with pytest.raises(TypeError, match=r"Expected optimizer_class to be a torch.optim.Optimizer class, got"):
            check_class(wrong)
    for wrong_params in (nn.Linear(1, 1), AdamW([weight]), AdamW):
        with pytest.raises(TypeError, match="Expected parameters or parameter groups, got"):
            check_params(wrong_params)
    for option in (1e-3, {"lr": 1e-3}, weight, "AdamW", None):
        with pytest.raises(TypeError, match=r"Expected parameters or parameter groups, got"):
            check_params(option)
    for kind in (ValueError, KeyError):  # torch raises either
        with pytest.raises(kind, match=r"Expected the parameters of group 1 under 'params', got a group with \['lr'\]"):
            check_params([{"params": [weight]}, {"lr": 1e-3}])
    for fits in (AdamW, _takes_any, lambda params: SGD(params)):
        check_class(fits)
    check_params([weight])
    check_params(iter([weight]))


def test_a_flag_that_is_no_bool_is_refused() -> None:
    check_flags(one=True, other=False)
    for wrong_flag in (1, "yes", None, torch.tensor(True)):
        with pytest.raises(TypeError, match="Expected one to be True or False, got"):
            check_flags(one=wrong_flag)


def test_a_process_group_is_one_or_none() -> None:
    assert is_process_group(None)
    assert not any(map(is_process_group, (1e-3, 1, "gloo", True, [0, 1])))


def test_a_parameter_in_two_groups_is_named_with_both() -> None:
    one, two = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    with pytest.raises(ValueError, match=r"got the parameter 'b' in groups 0 and 1\..*\[ZERO-108\]$"):
        check_in_one_group([{"params": [("a", one)]}, {"params": [("b", one), ("c", two)]}])
    check_in_one_group([{"params": [one]}, {"params": [two]}])
