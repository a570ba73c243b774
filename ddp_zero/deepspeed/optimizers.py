"""Lion and Lamb, which torch does not have, and Muon for matrices with Adam for all else, with DeepSpeed's options.

Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023. Lamb: You et al., "Large Batch Optimization
for Deep Learning", 2020. Muon: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: the
momentum of a matrix is replaced by one whose singular values are all about 1, found by five rounds of a polynomial in
the matrix (Newton-Schulz). With ``ns_method="gram"`` the rounds work on the smaller square matrix X X^T.

Alternatives considered, next to DeepSpeed 0.19.8 over 20 steps (tests/deepspeed/test_optimizers.py): `torch.optim.Muon`
of torch 2.13 takes 2-D parameters only, has no ``gram``, DeepSpeed's default, and is up to 0.005 away from it at a rate
of 0.02, where this one differs in no bit; torch before 2.9 has none. Lamb of pytorch_optimizer 4.1 has no bounds of the
coefficient and no bias correction. Its Lion gives the same bits as this one, but accepts misspelled options silently,
and would have to be installed for 15 lines.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.core.local import elementwise

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_ROUNDS, _RESTART = 5, 2
_SMALL = 1e-7
METHODS = {"standard": torch.bfloat16, "gram": torch.float16}
"""Methods of orthogonalization, and the dtype of each."""

MUON_OPTIONS = ("lr", "momentum", "weight_decay", "ns_method")
ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_KINDS = ((True, MUON_OPTIONS, "muon_lr", 0.02), (False, ADAM_OPTIONS, "adam_lr", 3e-4))


class _ByParameter(Optimizer):
    """Steps each parameter that has a gradient with `_update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        raise NotImplementedError("every optimizer has an update")


def _check(lr: float, betas: tuple[float, float], weight_decay: float) -> dict[str, Any]:
    first, second = betas
    for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ValueError(f"Expected {name} of at least 0, got {value!r}. [ZERO-103]")
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"Expected betas from 0 up to 1, got {betas!r}. [ZERO-103]")
    return {"lr": lr, "betas": (first, second), "weight_decay": weight_decay}


@elementwise
class Lion(_ByParameter):
    """Steps by the sign of a momentum (Chen et al., 2023).

    The first of ``betas`` is the weight of the momentum in the update, the second that of the old momentum in the new
    one; ``weight_decay`` is decoupled.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, _check(lr, betas, weight_decay))

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        momentum = state["exp_avg"]
        update = (momentum * first).add_(grad, alpha=1 - first).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.mul_(second).add_(grad, alpha=1 - second)


class Lamb(_ByParameter):
    """Adam with a learning rate for each parameter (You et al., 2020).

    A parameter's rate is ``lr`` times the ratio of its norm to its update's norm, from ``min_coeff`` to ``max_coeff``.
    ``bias_correction`` is of the moments of the first steps; ``eps_inside_sqrt`` adds ``eps`` before taking the root of
    the second moment. Weight decay is part of the update, and of its norm.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        own = dict(eps=eps, eps_inside_sqrt=eps_inside_sqrt, max_coeff=max_coeff, min_coeff=min_coeff)
        super().__init__(params, {**_check(lr, betas, weight_decay), **own, "bias_correction": bias_correction})

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(first).add_(grad, alpha=1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        root = (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])
        update = mean.div(root).add_(param, alpha=group["weight_decay"])
        size = param.norm()
        change = update.norm()
        ratio = (size / change).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((size == 0) | (change == 0), torch.ones_like(ratio), ratio)
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
        param.sub_(update.mul_(ratio), alpha=rate)


class MuonWithAdam(_ByParameter):
    """Steps groups with ``use_muon`` by Muon, all other groups by Adam; see `muon_groups`.

    ``momentum`` is Muon's, used with Nesterov's look-ahead; weight decay is decoupled, unless ``adam_w_mode`` is False,
    for Adam. ``ns_method`` is one of `METHODS`.

    Raises:
        ValueError: for another method, or a parameter that is not a matrix in a group with ``use_muon``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_method: str = "gram",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
        use_muon: bool = True,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, ns_method=ns_method, betas=betas, eps=eps)
        super().__init__(params, {**defaults, "adam_w_mode": adam_w_mode, "use_muon": use_muon})
        for group in self.param_groups:
            if group["ns_method"] not in METHODS:
                raise ValueError(
                    f"Expected ns_method to be one of {list(METHODS)}, got {group['ns_method']!r}. [ZERO-103]"
                )
            for param in group["params"] if group["use_muon"] else ():
                if param.ndim < 2:
                    raise ValueError(
                        f"Muon steps matrices; a group with use_muon has a parameter of shape {list(param.shape)}. "
                        "[ZERO-103]"
                    )

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if group["use_muon"]:
            self._update_by_muon(param, grad, state, group)
        else:
            self._update_by_adam(param, grad, state, group)

    def _update_by_muon(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        beta = group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - beta)
        ahead = grad.lerp(momentum, beta)
        matrix = ahead.reshape(len(ahead), -1) if ahead.ndim == 4 else ahead
        rows, columns = grad.shape[-2:]  # not of the matrix, as in DeepSpeed: of a convolution, its kernel's sides
        scale = math.sqrt(rows / columns) if rows > columns else 1.0
        update = (orthogonalize(matrix, group["ns_method"]) * scale).to(grad.dtype)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(update.reshape(param.shape), alpha=group["lr"])

    def _update_by_adam(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        if group["adam_w_mode"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad.add(param, alpha=group["weight_decay"])
        mean = state["exp_avg"].lerp_(grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        root = (square / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        param.addcdiv_(mean, root, value=-group["lr"] / (1 - first ** state["step"]))


def orthogonalize(matrix: Tensor, method: str) -> Tensor:
    """A matrix, or batch, with the same singular vectors and singular values of about 1, in the method's dtype."""
    is_tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if is_tall else matrix
    if method == "gram":  # fp16 holds fewer sizes of numbers than a gradient may have
        wide = wide.float() if wide.dtype is torch.float16 else wide
    else:
        wide = wide.to(METHODS[method])
    normed = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + _SMALL)).to(METHODS[method])
    if method == "gram" and normed.size(-1) > normed.size(-2):
        factor, rest = _on_the_gram_matrix(normed)
        return rest.mT @ factor.mT if is_tall else factor @ rest
    found = _on_the_matrix(normed)
    return found.mT if is_tall else found


def _on_the_matrix(matrix: Tensor) -> Tensor:
    linear, cubic, quintic = _POLYNOMIAL
    for _ in range(_ROUNDS):
        gram = matrix @ matrix.mT
        matrix = linear * matrix + (cubic * gram + quintic * gram @ gram) @ matrix
    return matrix


def _on_the_gram_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The last rounds' factor on the matrix, computed from X X^T alone, and the matrix before them."""
    linear, cubic, quintic = _POLYNOMIAL
    gram = matrix @ matrix.mT
    factor = None
    for number in range(_ROUNDS):
        if number == _RESTART and factor is not None:
            matrix = factor @ matrix
            gram = matrix @ matrix.mT
            factor = None
        change = cubic * gram + quintic * gram @ gram
        if factor is None:
            factor = change + linear * torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
        else:
            factor = linear * factor + change @ factor
        if number + 1 not in (_ROUNDS, _RESTART):
            half = linear * gram + change @ gram
            gram = linear * half + change @ half
    assert factor is not None, "there are rounds after the restart"
    return factor, matrix


def muon_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[nn.Parameter, str], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Divide each group into matrices for Muon and all else for Adam, with the options of each.

    Embeddings and heads (``embed`` or ``lm_head`` in the name) go to Adam, whatever their shape. An attribute
    ``use_muon`` of a parameter takes precedence. Options ``muon_lr`` and ``adam_lr`` are the learning rates of one
    kind.
    """
    divided = []
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        for use_muon, known, lr, usual in _KINDS:
            chosen = [
                param for param in group["params"] if param.requires_grad and _is_for_muon(param, names) is use_muon
            ]
            if not chosen:
                continue
            shared = {"lr": usual} | {name: options[name] for name in known if name in options}
            rate = {"lr": options[lr]} if lr in options else {}
            mine = {name: value for name, value in own.items() if name in known}
            divided.append({"params": chosen, "use_muon": use_muon, **shared, **rate, **mine})
    return divided


def _is_for_muon(param: nn.Parameter, names: Mapping[nn.Parameter, str]) -> bool:
    given = getattr(param, "use_muon", None)
    if given is not None:
        return bool(given)
    name = names.get(param, "").lower()
    return param.ndim >= 2 and not any(word in name for word in ("embed", "lm_head"))
