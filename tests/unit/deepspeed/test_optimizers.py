"""Optimizers by name: the class, its options and groups; and those that torch does not have, against their formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_zero import check_shardable
from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.initialization import as_groups, choice_of, choose
from ddp_zero.deepspeed.optimizers import METHODS, Lamb, Lion, MuonWithAdam, orthogonalize


def chosen(name: str, model: nn.Module | None = None, **params: Any) -> Any:
    module = nn.Linear(3, 2) if model is None else model
    names = {param: name for name, param in module.named_parameters()}
    return choose(name, params, as_groups(None, module), names)


@pytest.mark.parametrize(
    ("name", "params", "expected", "options"),
    [
        ("Adam", {"lr": 1.0}, torch.optim.AdamW, {"lr": 1.0, "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False, "torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adamw", {"betas": [0.8, 0.9]}, torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("SGD", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ("Adagrad", {}, torch.optim.Adagrad, {}),
        ("RAdam", {}, torch.optim.RAdam, {}),
        ("torch.optim.NAdam", {}, torch.optim.NAdam, {}),
        ("Lion", {}, Lion, {}),
        ("Lamb", {"max_coeff": 1.0}, Lamb, {"max_coeff": 1.0}),
    ],
)
def test_a_name_is_a_class_with_options(name: str, params: dict[str, Any], expected: type, options: Any) -> None:
    choice = chosen(name, **params)
    assert (choice.optimizer_class, choice.options) == (expected, options)
    choice.optimizer_class(choice.groups, **choice.options)


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("AdemW", {}, "did you mean 'AdamW'"),
        ("FusedAdam", {}, "did you mean 'Adam'"),
        ("DeepSpeedCPUAdam", {}, "did you mean 'Adam'"),
        ("lr_scheduler", {}, "got 'lr_scheduler'"),
        ("nowhere.Optimizer", {}, "No module named 'nowhere'"),
        ("torch.nn.Linear", {}, "got 'torch.nn.Linear'"),
        ("MuAdam", {}, "write 'mup.MuAdam'"),
        ("SGD", {"momentun": 1}, "did you mean 'momentum'"),
        ("Adam", {"bias_correction": False}, "bias_correction"),
        ("Muon", {"per_head_muon": True}, "per_head_muon"),
        ("Muon", {"momentun": 1}, "did you mean 'momentum'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(name, **params)
    assert told in str(raised.value)


def test_groups_have_no_frozen_parameters() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert as_groups(None, model) == [{"params": [model.weight]}]
    assert as_groups([{"params": model.parameters(), "lr": 1}, {"params": [model.bias]}], model) == [
        {"params": [model.weight], "lr": 1}
    ]
    assert as_groups(model.named_parameters(), model) == [{"params": [model.weight]}]
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        as_groups(None, model)


def test_an_optimizer_that_was_built_is_a_choice() -> None:
    plain = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=0.5, betas=(0.1, 0.2))
    choice = choice_of(plain)
    assert choice.optimizer_class is torch.optim.AdamW
    assert (choice.options["lr"], choice.options["betas"]) == (0.5, (0.1, 0.2))
    assert choice.groups is plain.param_groups
    torch.optim.AdamW(choice.groups, **choice.options)


def stepped(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=generator) for _ in range(3)]


def test_lion_equals_its_formula() -> None:
    param = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    value, momentum = param.detach().clone(), torch.zeros(4, 3)
    for grad in gradients():
        update = torch.sign(0.8 * momentum + 0.2 * grad)
        value = value - 0.1 * (update + 0.5 * value)
        momentum = 0.9 * momentum + 0.1 * grad
    found = stepped(Lion([param], lr=0.1, betas=(0.8, 0.9), weight_decay=0.5), param, gradients())
    torch.testing.assert_close(found, value)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("least", "most"), [(0.01, 10.0), (0.5, 0.6)])
def test_lamb_equals_its_formula(inside: bool, least: float, most: float) -> None:
    param = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    value, mean, square = param.detach().clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    for step, grad in enumerate(gradients(), start=1):
        mean = 0.9 * mean + 0.1 * grad
        square = 0.99 * square + 0.01 * grad**2
        root = torch.sqrt(square + 1e-3) if inside else torch.sqrt(square) + 1e-3
        update = mean / root + 0.5 * value
        ratio = min(max(float(value.norm() / update.norm()), least), most)
        value = value - 0.1 * math.sqrt(1 - 0.99**step) / (1 - 0.9**step) * ratio * update
    options = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.5, min_coeff=least, max_coeff=most)
    found = stepped(Lamb([param], eps_inside_sqrt=inside, **options), param, gradients())  # type: ignore[arg-type]
    torch.testing.assert_close(found, value)


def test_lamb_leaves_a_parameter_that_is_zero_with_a_ratio_of_one() -> None:
    param = nn.Parameter(torch.zeros(3))
    found = stepped(Lamb([param], lr=0.1, bias_correction=False, betas=(0.0, 0.0)), param, [torch.ones(3)])
    torch.testing.assert_close(found, torch.full((3,), -0.1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8), (2, 5, 9)])
def test_singular_values_become_about_one(method: str, shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrix, method).float()
    values = torch.linalg.svdvals(found)
    assert float(values.max()) < 1.35
    assert float(values.min()) > 0.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    overlap = (found * (left @ right)).sum((-2, -1)) / values.sum(-1)
    assert float(overlap.min()) > 0.98, "the same singular vectors"


def test_muon_divides_groups_and_both_kinds_have_their_options() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
    model["body"].bias.requires_grad_(False)
    choice = chosen("Muon", model, lr=0.1, momentum=0.8, betas=[0.5, 0.6], adam_lr=0.2, weight_decay=0.3)
    muon, adam = choice.groups
    assert muon["params"] == [model["body"].weight]
    assert {name: value for name, value in muon.items() if name != "params"} == {
        **{"use_muon": True, "lr": 0.1, "momentum": 0.8, "weight_decay": 0.3}
    }
    assert adam["params"] == [model["embed"].weight, *model["lm_head"].parameters()]
    assert (adam["lr"], adam["betas"], adam["use_muon"]) == (0.2, (0.5, 0.6), False)
    optimizer = choice.optimizer_class(choice.groups, **choice.options)
    assert isinstance(optimizer, MuonWithAdam)
    with pytest.raises(ValueError, match="a group with use_muon has a parameter of shape"):
        MuonWithAdam([nn.Parameter(torch.ones(3))])


def test_muon_with_adam_steps_others_as_adam_does() -> None:
    for is_decoupled, other in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3)) for _ in range(2))
        options: dict[str, Any] = dict(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
        group = {"params": [mine], "use_muon": False}
        found = stepped(MuonWithAdam([group], adam_w_mode=is_decoupled, **options), mine, gradients())
        torch.testing.assert_close(found, stepped(other([theirs], **options), theirs, gradients()))


def test_muon_is_torchs_with_the_same_method() -> None:
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3)) for _ in range(2))
    options: dict[str, Any] = dict(lr=0.1, momentum=0.9, weight_decay=0.2)
    found = stepped(MuonWithAdam([mine], ns_method="standard", **options), mine, gradients())
    expected = stepped(torch.optim.Muon([theirs], **options), theirs, gradients())
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)  # rounds in bf16, differently arranged


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_lion_and_lamb_can_be_sharded(kind: Any) -> None:
    check_shardable(kind, lr=0.1)
