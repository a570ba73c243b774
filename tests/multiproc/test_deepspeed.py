"""The engine with DeepSpeed's calls, bit for bit next to DDP, the unsharded optimizer and fp32 masters by hand."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero import deepspeed as ours
from ddp_zero.core.engine import partition_choice
from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.engine import EngineOptimizer
from ddp_zero.options import PartitionName
from tests.multiproc.harness import Cases, Setup


def whole_and_cut(setup: Setup, body: Callable[[Setup], None]) -> None:
    """Run a case with whole parameters, and with such that are cut between ranks where a large model's would be."""
    body(setup)
    folder = setup.folder / "cut"
    folder.mkdir(exist_ok=True)
    with mock.patch.object(partition_choice, "RING_BYTES", 0):
        body(replace(setup, folder=folder))


case = Cases(whole_and_cut, timeout=240)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 8


class Net(nn.Module):
    """Matrices and vectors, and a buffer that stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 3))
        self.register_buffer("offset", torch.linspace(0, 1, 3))

    offset: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        output = output + self.offset
        return output


def data(rank: int, rounds: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    for _ in range(rounds):
        yield torch.randn(4, 6, generator=generator).to(dtype), torch.randn(4, 3, generator=generator)


@dataclass
class Plain:
    """What the engine should do, with DDP, AdamW over fp32 copies, and DeepSpeed's rule for the loss scale."""

    model: nn.Module
    dtype: torch.dtype
    stage: int
    rounds: int
    clip: float
    scale: float = 1.0
    window: int = 3
    patience: int = 2
    good: int = -1
    skipped: int = 0
    has_autocast: bool = False
    averages_all: bool = False
    sums: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for param in self.model.parameters():
            param.data = param.data.to(self.dtype)
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        low = self.dtype is not FP32
        self.params = list(self.ddp.parameters())
        self.stepped = [nn.Parameter(one.detach().float()) if low else one for one in self.params]
        self.optimizer = torch.optim.AdamW(self.stepped, lr=0.02, weight_decay=0.1)
        self.norm: float | None = None

    def train(
        self, batches: list[tuple[Tensor, Tensor]], spoil: float = 1.0, edit: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        self.optimizer.zero_grad()
        self.ddp.zero_grad()
        for number, (inputs, targets) in enumerate(batches):
            averages = self.stage == 2 or self.averages_all or number == len(batches) - 1
            self.ddp.require_backward_grad_sync = averages
            with torch.autocast("cpu", BF16, enabled=self.has_autocast):
                output = self.ddp(inputs)
            loss = (output.float() - targets).square().mean() * spoil
            divided = loss / self.rounds if self.rounds > 1 else loss
            (divided * self.scale if self.dtype is FP16 else divided).backward()
            if self.stage == 2:
                self._add_up()
        for stepped, param, index in zip(self.stepped, self.params, range(len(self.params)), strict=True):
            grad = self.sums.get(index, param.grad)
            assert grad is not None
            stepped.grad = grad.float() if edit is None else edit(grad.to(self.dtype)).float()
        self.sums.clear()
        self._step()
        last: Tensor = loss
        return last

    def _add_up(self) -> None:
        for index, param in enumerate(self.params):
            assert param.grad is not None
            grad = param.grad.float()
            self.sums[index] = self.sums[index] + grad if index in self.sums else grad
            param.grad = None

    def _step(self) -> None:
        for stepped in self.stepped:
            assert stepped.grad is not None
            if self.dtype is FP16:
                stepped.grad.mul_(1 / self.scale)
        has_overflowed = not all(bool(torch.isfinite(one.grad).all()) for one in self.stepped)  # type: ignore[arg-type]
        self._follow(has_overflowed)
        if has_overflowed:
            self.skipped += 1
            self.norm = float("inf")
            return
        self.norm = float(clip_grad_norm_(self.stepped, self.clip if self.clip > 0 else float("inf")))
        self.optimizer.step()
        with torch.no_grad():
            for stepped, param in zip(self.stepped, self.params, strict=True):
                param.copy_(stepped)

    def _follow(self, has_overflowed: bool) -> None:
        if self.dtype is not FP16:
            return
        if has_overflowed:
            self.good = -1
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale / 2, 1.0)
            return
        self.good += 1
        if self.good == self.window:
            self.good, self.patience = 0, 2
            self.scale *= 2


def config(stage: int, dtype: torch.dtype = FP32, rounds: int = 1, clip: float | None = None, **zero: Any) -> Any:
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": rounds,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **zero},
    }
    if clip is not None:
        document["gradient_clipping"] = clip
    if dtype is BF16:
        document["bf16"] = {"enabled": True}
    if dtype is FP16:
        document["fp16"] = {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 3}
    return document


def start(document: dict[str, Any], model: nn.Module | None = None, **more: Any) -> ours.Engine:
    engine, optimizer, _, scheduler = ours.initialize(model=Net() if model is None else model, config=document, **more)
    assert engine.optimizer is optimizer
    assert engine.lr_scheduler is scheduler
    return engine


def assert_moved(engine: ours.Engine) -> None:
    before = Net().to(next(engine.module.parameters()).dtype)
    pairs = zip(engine.module.parameters(), before.parameters(), strict=True)
    assert all(not torch.equal(one, two) for one, two in pairs), "nothing moved"


def assert_same(plain: Plain, engine: ours.Engine, where: str, has_norm: bool = True) -> None:
    for (name, one), other in zip(engine.module.named_parameters(), plain.params, strict=True):
        assert one.dtype is plain.dtype, where
        assert torch.equal(one, other), f"{where}: {name}"
    assert engine.skipped_steps == plain.skipped, where
    assert engine.loss_scale() == (plain.scale if plain.dtype is FP16 else 1.0), where
    if has_norm:
        assert engine.get_global_grad_norm() == plain.norm, where


COMBINATIONS: list[dict[str, Any]] = [
    dict(stage=0, clip=0.2),
    dict(stage=0, rounds=2, clip=0.0),
    dict(stage=0, dtype=BF16, clip=0.2),
    dict(stage=1, rounds=2),
    dict(stage=1, clip=0.2, overlap_comm=True),
    dict(stage=1, clip=0.0, dtype=BF16, rounds=3),
    dict(stage=1, dtype=FP16, clip=0.2, rounds=2),
    dict(stage=2, clip=0.2, rounds=2, ignore_unused_parameters=False),
    dict(stage=2, clip=0.0, overlap_comm=True),
    dict(stage=2, dtype=BF16, rounds=2, clip=0.2, reduce_bucket_size=60),
    dict(stage=2, dtype=FP16, clip=0.2, overlap_comm=True),
    dict(stage=2, dtype=FP16, clip=0.0, rounds=2, ignore_unused_parameters=False),
    dict(stage=0, clip=0.2, offload_optimizer={"device": "cpu"}),
    dict(stage=2, dtype=BF16, clip=0.2, overlap_comm=True, cpu_offload=True),
]


# each stage in each dtype that it can have, each way to clip, rounds and overlap
@case(2, few=[COMBINATIONS[place] for place in (1, 4, 6, 7, 10)], every=COMBINATIONS)
def _every_stage_equals_ddp(setup: Setup, configurations: list[dict[str, Any]]) -> None:
    for options in configurations:
        dtype, rounds, stage = options.get("dtype", FP32), options.get("rounds", 1), options["stage"]
        clip = options.get("clip", 1.0)  # DeepSpeed's default
        document = config(**{"clip": None, **options})
        engine = start(document)
        plain = Plain(Net(), dtype, stage, rounds, clip, scale=2.0**7)
        assert engine.module.offset.dtype is FP32
        batches = data(setup.rank, STEPS * rounds, dtype)
        for step in range(STEPS):
            mine = [next(batches) for _ in range(rounds)]
            is_spoiled = dtype is not FP32 and step in (2, 4, 5, 6) and setup.rank == 1
            spoil = float("inf") if is_spoiled else 1.0
            expected = plain.train(mine, spoil)
            for number, (inputs, targets) in enumerate(mine):
                loss = (engine(inputs).float() - targets).square().mean() * spoil
                assert engine.is_gradient_accumulation_boundary() == (number == len(mine) - 1)
                engine.backward(loss)
                engine.step()
            assert torch.equal(loss, expected) or is_spoiled, (options, step)
            assert_same(plain, engine, f"{options}, step {step}")
            assert engine.was_step_applied() != (dtype is not FP32 and step in (2, 4, 5, 6))
        assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * rounds)
        assert plain.skipped == (0 if dtype is FP32 else 4), "overflows were forced"
        moved = [not torch.equal(one.float(), two) for one, two in zip(plain.params, Net().parameters(), strict=True)]
        assert all(moved), options


LATE: list[dict[str, Any]] = [
    dict(stage=0, clip=0.2),
    dict(stage=1, clip=0.2),
    dict(stage=1, clip=0.0, overlap_comm=True, compute_grad_norm=False),
    dict(stage=1, clip=0.2, ignore_unused_parameters=False, dtype=BF16),
    dict(stage=1, clip=0.2, overlap_comm=True, dtype=FP16),
    dict(stage=2, clip=0.2),
    dict(stage=2, clip=0.0, overlap_comm=True, compute_grad_norm=False, ignore_unused_parameters=False),
    dict(stage=2, clip=0.2, dtype=BF16),
]


@case(
    2,
    few=[(options, place % 2 == 0) for place, options in enumerate([LATE[1], LATE[3], LATE[6]])],
    every=[*product(LATE, (True, False))],
)
def _the_boundary_may_be_set_between_forward_and_backward(
    setup: Setup, configurations: list[tuple[dict[str, Any], bool]]
) -> None:
    """Then every round is averaged; before, none but the last is in stages 0 and 1. Steps have any number of rounds."""
    for options, is_late in configurations:
        dtype, stage = options.get("dtype", FP32), options["stage"]
        engine = start(config(**options))
        plain = Plain(Net(), dtype, stage, 1, options["clip"], scale=2.0**7, averages_all=is_late)
        for step in range(6):
            batches = list(data(setup.rank + step, 1 + step % 3, dtype))
            plain.train(batches)
            for number, (inputs, targets) in enumerate(batches):
                is_last = number == len(batches) - 1
                if not is_late:
                    engine.set_gradient_accumulation_boundary(is_last)
                loss = (engine(inputs).float() - targets).square().mean()
                if is_late:
                    engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(loss)
                engine.step()
            assert_same(plain, engine, f"{options}, {is_late=}, step {step}", has_norm=engine.zero is None)
        assert (engine.global_steps, engine.micro_steps) == (6, 12)
        assert_moved(engine)


@case(2)
def _the_first_boundary_may_come_after_a_forward_pass_that_was_not_prepared(setup: Setup) -> None:
    """The script ends a step early, or runs only one of the two passes in ``no_sync()``."""
    for stage in (0, 1, 2):
        for clip in (0.0, 0.2):
            engine = start(config(stage, rounds=4, clip=clip, overlap_comm=stage > 0))
            plain = Plain(Net(), FP32, stage, 4, clip)
            batches = list(data(setup.rank, 2, FP32))
            plain.train(batches)
            for number, (inputs, targets) in enumerate(batches):
                loss = (engine(inputs) - targets).square().mean()
                if number == 1:
                    engine.set_gradient_accumulation_boundary(True)
                engine.backward(loss)
                engine.step()
            assert_same(plain, engine, f"stage {stage}, {clip=}")
            assert_moved(engine)
    for stage in (0, 1, 2):
        engine, plain = start(config(stage)), Plain(Net(), FP32, stage, 1, 1.0)
        for inputs, targets in data(setup.rank, 3, FP32):
            plain.train([(inputs, targets)])
            with engine.no_sync():
                loss = (engine(inputs) - targets).square().mean()
            engine.backward(loss)
            engine.step()
            assert_same(plain, engine, f"stage {stage}, forward in no_sync")
        assert_moved(engine)


@case(2)
def _two_backward_passes_over_a_forward_pass_add_up(setup: Setup) -> None:
    for stage, rounds in ((0, 1), (1, 1), (2, 1), (1, 2)):
        engine = start(config(stage, rounds=rounds))
        reference = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.1)
        for inputs, targets in data(setup.rank, 3, FP32):
            output = reference(inputs)
            ((output - targets).square().mean() + output.abs().mean()).backward()
            clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(rounds):
                output = engine(inputs)
                engine.backward((output - targets).square().mean(), retain_graph=True)
                engine.backward(output.abs().mean())
                engine.step()
            for one, other in zip(engine.module.parameters(), reference.module.parameters(), strict=True):
                # averages of two sums against sums of averages
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"stage {stage}, {rounds=}")
        assert_moved(engine)


@case(2)
def _a_schedule_follows_the_steps_that_were_taken(setup: Setup) -> None:
    document = config(2, FP16)
    document["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.4},
    }
    engine = start(document)
    rates = []
    for step, (inputs, targets) in enumerate(data(setup.rank, 8, FP16)):
        rates.append(engine.get_lr()[0])
        loss = (engine(inputs).float() - targets).square().mean() * (float("inf") if step == 3 else 1.0)
        engine.backward(loss)
        engine.step()
    assert rates == pytest.approx([0, 0, 0.1, 0.2, 0.2, 0.3, 0.4, 0.4])
    assert engine.lr_scheduler.get_last_lr() == engine.get_lr()


@case(2)
def _a_checkpoint_continues_in_any_stage(setup: Setup) -> None:
    """Under tags, with `latest`, client state, counters, the schedule and the loss scale."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20}}
    for name, (before, after, dtype) in {"a": (2, 1, FP16), "b": (1, 2, BF16), "c": (0, 2, FP32)}.items():
        folder = setup.folder / name
        documents = [{**config(stage, dtype), "scheduler": schedule} for stage in (before, after)]
        batches = list(data(setup.rank, 8, dtype))
        first = start(documents[0])
        run(first, batches[:4], spoils=2 if dtype is FP16 else None)
        assert first.save_checkpoint(folder, client_state={"epoch": 3, "rng": torch.arange(3)})
        assert (folder / "latest").read_text() == "global_step4"
        run(first, batches[4:])
        second = start(documents[1])
        path, client = second.load_checkpoint(folder)
        assert path == str(folder / "global_step4")
        assert client is not None
        assert (client["epoch"], client["rng"].tolist()) == (3, [0, 1, 2])
        assert (second.global_steps, second.skipped_steps) == (4, 1 if dtype is FP16 else 0)
        run(second, batches[4:])
        for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
            assert torch.equal(one, other), name
        assert (first.get_lr(), first.loss_scale()) == (second.get_lr(), second.loss_scale())
        assert first.save_checkpoint(folder, tag="global_step4", save_latest=False), "a tag can be saved again"
        third = start(documents[1])
        assert third.load_checkpoint(folder, tag="global_step4", load_module_only=True)[0]
        assert (third.global_steps, third.lr_scheduler.last_batch_iteration) == (0, -1)
        run(third, batches[:1])
    assert third.load_checkpoint(setup.folder / "nowhere") == (None, None)
    for tag in ("../up", "..", ".", "", "a/b", "latest", "a\0b", 300 * "a"):
        for refuses in (third.save_checkpoint, third.load_checkpoint):
            with pytest.raises(ValueError, match="tag that names a folder"):
                refuses(setup.folder, tag=tag)
    methods: tuple[Callable[..., Any], ...] = third.save_checkpoint, third.load_checkpoint, third.save_16bit_model
    for method in methods:
        with pytest.raises(TypeError, match="_dir to be the path of a folder, got None"):
            method(None)


@case(2)
def _a_file_latest_without_a_tag_is_refused_on_every_rank(setup: Setup) -> None:
    engine, file = start(config(1)), setup.folder / "latest"
    run(engine, list(data(setup.rank, 1, FP32)))
    engine.save_checkpoint(setup.folder)
    for content in (b"\xff\xfe\x00", b"x" * (1 << 20), b"..", b"../other", b"a/b", b" \n", b"a\0b", b"latest"):
        dist.barrier()
        if setup.rank == 0:
            file.write_bytes(content)
        dist.barrier()
        with pytest.raises(ValueError, match=r"Expected the tag of a checkpoint in .*latest, got: .* \[ZERO-711\]$"):
            engine.load_checkpoint(setup.folder)
    dist.barrier()
    if setup.rank == 0:
        file.write_bytes(b"global_step1\n")
    dist.barrier()
    assert engine.load_checkpoint(setup.folder)[0] == str(setup.folder / "global_step1")
    dist.barrier()
    if setup.rank == 0:
        file.unlink()
    dist.barrier()
    assert engine.load_checkpoint(setup.folder) == (None, None)


@case(2, marks=[pytest.mark.nightly])
def _a_checkpoint_in_the_middle_of_accumulation_is_that_of_the_last_step(setup: Setup) -> None:
    for stage in (0, 1, 2):
        for dtype in (FP32, BF16):
            document, batches = config(stage, dtype, rounds=2), list(data(setup.rank, 8, dtype))
            first, second = start(document), start(document)
            run(first, batches[:5])
            folder = setup.folder / f"{stage} {dtype}"
            assert first.save_checkpoint(folder)
            run(first, batches[5:])
            run(second, batches[:3])  # its third round is dropped
            assert second.load_checkpoint(folder)[0]
            assert (second.global_steps, second.micro_steps, second.local_rank) == (2, 4, setup.rank)
            run(second, batches[4:])
            assert second.global_steps == first.global_steps == 4
            for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
                assert torch.equal(one, other), f"stage {stage}, {dtype}"


@case(2)
def _weights_are_loaded_by_a_function_of_the_user(setup: Setup) -> None:
    def from_old_names(src: dict[str, Tensor], dst: nn.Module) -> None:
        calls.append(sorted(src))
        dst.load_state_dict({name: value + 1 for name, value in src.items()})

    for stage in (0, 2):
        calls: list[list[str]] = []
        batches = list(data(setup.rank, 4, BF16))
        first, second, third = (start(config(stage, BF16)) for _ in range(3))
        run(first, batches[:2])
        folder = setup.folder / f"custom {stage}"
        first.save_checkpoint(folder)
        second.load_checkpoint(folder, load_module_only=True, custom_load_fn=from_old_names)
        third.load_module_state_dict({"module": first.module_state_dict()}, custom_load_fn=from_old_names)
        assert calls == [sorted(first.module.state_dict())] * 2
        for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
            assert torch.equal(one + 1, other)
        run(second, batches[2:])
        run(third, batches[2:])
        for one, other in zip(second.module.parameters(), third.module.parameters(), strict=True):
            assert torch.equal(one, other), "masters follow"
        third.load_module_state_dict({"module": first.module_state_dict()})
        assert third.save_fp16_model(folder)
        for name, value in torch.load(folder / "pytorch_model.bin", weights_only=True).items():
            assert torch.equal(value, first.module.state_dict()[name])
        third.destroy()
        assert all(param.grad is None for param in third.module.parameters())


@case(2)
def _frozen_parameters_can_be_left_out(setup: Setup) -> None:
    def build(seed: int, stage: int, is_frozen: bool = True) -> ours.Engine:
        model = Net()
        for param in model.layers[0].parameters():
            param.requires_grad_(not is_frozen)
            param.data.add_(seed)
        return start(config(stage, BF16), model)

    first = build(0, 1)
    run(first, list(data(setup.rank, 3, BF16)))
    assert first.save_checkpoint(setup.folder, exclude_frozen_parameters=True)
    second = build(1, 2)
    before = {name: param.detach().clone() for name, param in second.module.named_parameters()}
    assert second.load_checkpoint(setup.folder)[0]
    for name, param in second.module.named_parameters():
        expected = first.module.get_parameter(name)
        assert not torch.equal(before[name], expected), name
        assert torch.equal(param, before[name] if name.startswith("layers.0.") else expected), name
    trainable = build(1, 2, is_frozen=False)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' of the model is not in the checkpoint"):
        trainable.load_checkpoint(setup.folder)
    assert first.save_checkpoint(setup.folder / "whole")
    assert second.load_checkpoint(setup.folder / "whole")[0]
    for name, param in second.module.named_parameters():
        assert torch.equal(param, first.module.get_parameter(name)), name


def run(engine: ours.Engine, batches: list[tuple[Tensor, Tensor]], spoils: int | None = None) -> None:
    for number, (inputs, targets) in enumerate(batches):
        loss = (engine(inputs).float() - targets).square().mean() * (float("inf") if number == spoils else 1.0)
        engine.backward(loss)
        engine.step()


@case(2)
def _weights_are_saved_as_they_are_or_in_fp32(setup: Setup) -> None:
    model = Net()
    model.layers[0].bias.requires_grad_(False)
    engine = start(config(2, BF16), model)
    run(engine, list(data(setup.rank, 3, BF16)))
    masters = {name: ours.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    assert engine.save_16bit_model(setup.folder / "out")
    assert engine.save_fp32_model(setup.folder / "out", "fp32.bin", exclude_frozen_parameters=True)
    dist.barrier()
    low = torch.load(setup.folder / "out" / "pytorch_model.bin", weights_only=True)
    full = torch.load(setup.folder / "out" / "fp32.bin", weights_only=True)
    state = engine.module.state_dict()
    assert set(low) == set(state)
    assert set(full) == set(state) - {"layers.0.bias"}
    for name, value in low.items():
        assert torch.equal(value, state[name]), name
    for name in set(full) - {"offset"}:
        assert torch.equal(full[name], masters[name]), name  # type: ignore[arg-type]
    assert not torch.equal(full["layers.0.weight"], low["layers.0.weight"].float()), "masters are more precise"
    with pytest.raises(ValueError, match="safetensors"):
        engine.save_16bit_model(setup.folder, "model.safetensors")


@case(
    2,
    few=[(1, BF16, None), (2, FP32, "elements")],
    every=[(1, BF16, None), (2, BF16, None), (2, FP32, "elements"), (1, FP32, None)],
)
def _safe_get_functions_have_the_unsharded_optimizers_values(
    setup: Setup, configurations: list[tuple[int, torch.dtype, PartitionName | None]]
) -> None:
    """Of masters, gradients and state, as the unsharded optimizer has them."""
    for stage, dtype, partition in configurations:
        engine = start_with(stage, dtype, partition)
        plain = Plain(Net(), dtype, stage, 1, 1.0)
        batches = list(data(setup.rank, 3, dtype))
        assert all(ours.safe_get_full_optimizer_state(one, "exp_avg") is None for one in engine.module.parameters())
        for batch in batches:
            run(engine, [batch])
            plain.train([batch], 1.0)
        for param, stepped in zip(engine.module.parameters(), plain.stepped, strict=True):
            expected = plain.optimizer.state[stepped]
            where = f"stage {stage}, {dtype}, {partition}"
            assert torch.equal(value_of(ours.safe_get_full_fp32_param(param)), stepped), where
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(value_of(ours.safe_get_full_optimizer_state(param, key)), expected[key]), (
                    where,
                    key,
                )
            assert ours.safe_get_full_optimizer_state(param, "nothing") is None
            assert ours.safe_get_full_grad(param) is None
        _gradients(setup, engine, plain)
        _set_values(setup, engine)


def start_with(stage: int, dtype: torch.dtype, partition: PartitionName | None) -> ours.Engine:
    if partition is None:
        return start(config(stage, dtype))
    model = Net()
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        stage=stage,
        partition=partition,
        max_grad_norm=1.0,
        lr=0.02,
        weight_decay=0.1,
    )
    return start(config(stage, dtype), model, optimizer=zero)


def value_of(found: Tensor | None) -> Tensor:
    assert found is not None
    return found


def _gradients(setup: Setup, engine: ours.Engine, plain: Plain) -> None:
    inputs, targets = next(iter(data(setup.rank + 9, 1, plain.dtype)))
    engine.backward((engine(inputs).float() - targets).square().mean())
    plain.ddp.zero_grad()
    (plain.ddp(inputs).float() - targets).square().mean().backward()
    held = 0
    for param, other in zip(engine.module.parameters(), plain.params, strict=True):
        assert other.grad is not None
        assert torch.equal(value_of(ours.safe_get_full_grad(param)), other.grad.float())
        mine = ours.safe_get_local_grad(param)
        held += 0 if mine is None else mine.numel()
    everyone = torch.tensor(held)
    dist.all_reduce(everyone)
    assert everyone.item() == sum(param.numel() for param in engine.module.parameters()), "every element has one owner"
    ours.safe_update_full_grad_vectorized(engine.module.parameters(), lambda grad, param: torch.zeros_like(grad))
    for param in engine.module.parameters():
        assert not value_of(ours.safe_get_full_grad(param)).any()
    engine.step()
    assert engine.get_global_grad_norm() == 0.0, "the step has used what was set"


def doubled(grad: Tensor) -> Tensor:
    return grad * -2 + 0.25


SETTING_MODES: list[tuple[int, torch.dtype, dict[str, Any]]] = [
    *((stage, dtype, {}) for stage in (1, 2) for dtype in (FP32, BF16, FP16)),
    (1, FP32, {"clip": 0.0, "overlap_comm": True, "compute_grad_norm": False}),
    (2, FP32, {"clip": 0.0, "overlap_comm": True, "compute_grad_norm": False}),
]
SETTING_WAYS = ("whole", "vectorized", "local")


@case(
    2,
    few=[(SETTING_MODES[mode], SETTING_WAYS[place % 3]) for place, mode in enumerate((0, 3, 7))],
    every=[*product(SETTING_MODES, SETTING_WAYS)],
)
def _gradients_are_set_whole_or_by_their_owners(
    setup: Setup, configurations: list[tuple[tuple[int, torch.dtype, dict[str, Any]], str]]
) -> None:
    for (stage, dtype, options), way in configurations:
        where = f"stage {stage}, {dtype}, {options}, {way}"
        engine = start(config(stage, dtype, **options))
        clip = options.get("clip", 1.0)
        plain = Plain(Net(), dtype, stage, 1, clip, scale=2.0**7)
        for batch in data(setup.rank, 3, dtype):
            plain.train([batch], edit=doubled)
            inputs, targets = batch
            engine.backward((engine(inputs).float() - targets).square().mean())
            set_gradients(engine, way, where)
            engine.step()
            for one, other in zip(engine.module.parameters(), plain.params, strict=True):
                # the norm of a gradient whose parts were set is that of its parts, which differs in its last bits
                near = way == "local" and clip > 0 and stage == 1
                torch.testing.assert_close(one, other, rtol=1e-2 * near, atol=1e-3 * near, msg=where)
        assert_moved(engine)


def set_gradients(engine: ours.Engine, way: str, where: str) -> None:
    params = list(engine.module.parameters())
    before = [value_of(ours.safe_get_full_grad(param)) for param in params]
    dtype = params[0].dtype
    expected = [doubled(grad.to(dtype)).float() for grad in before]
    assert all(not torch.equal(one, other) for one, other in zip(before, expected, strict=True)), where
    if way == "vectorized":
        ours.safe_update_full_grad_vectorized(params, lambda grad, _: doubled(grad.to(dtype)))
    for param, value in zip(params, expected, strict=True):
        if way == "whole":
            ours.safe_set_full_grad(param, value)
        if way == "local" and (mine := ours.safe_get_local_grad(param)) is not None:
            ours.safe_set_local_grad(param, doubled(mine))
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(value_of(ours.safe_get_full_grad(param)), value), where
        mine = ours.safe_get_local_grad(param)
        held = torch.tensor([0.0 if mine is None else mine.float().sum()])
        dist.all_reduce(held)
        torch.testing.assert_close(held[0], value.sum(), msg=where)


@case(2)
def _owners_edits_are_not_mistaken_for_those_of_every_rank(setup: Setup) -> None:
    engine = start(config(1))
    assert engine.zero is not None
    inputs, targets = next(iter(data(setup.rank, 1, FP32)))
    params = list(engine.module.parameters())
    for _ in range(2):
        engine.backward((engine(inputs) - targets).square().mean())
        own = [param for param in params if ours.safe_get_local_grad(param) is not None]
        for param in own:
            ours.safe_set_local_grad(param, torch.ones_like(value_of(ours.safe_get_local_grad(param))))
        for refused in (partial(engine.zero.clip_grad_norm_, 1.0), partial(engine.zero.full_grad, own[0])):
            with pytest.raises(RuntimeError, match=r"cannot follow safe_set_local_grad\(\).*ZERO-713"):
                refused()
        edited = engine.zero.owned_gradients()  # on every rank: from here on all know
        assert all(bool((edited[param] == 1).all()) for param in own)
        for param in own:
            ours.safe_set_local_grad(param, torch.full_like(value_of(ours.safe_get_local_grad(param)), 2.0))
        for param in params:
            assert bool((value_of(engine.zero.full_grad(param)) == 2).all())
        for param in params:
            ours.safe_set_full_grad(param, torch.full_like(param, 3.0))
            assert bool((value_of(ours.safe_get_full_grad(param)) == 3).all())
        expected = (9.0 * sum(param.numel() for param in params)) ** 0.5
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-5)


def _set_values(setup: Setup, engine: ours.Engine) -> None:
    param = next(engine.module.parameters())
    ones = torch.full_like(param, 1.25, dtype=FP32)
    ours.safe_set_full_fp32_param(param, ones)
    assert torch.equal(param.float(), ones)
    assert torch.equal(value_of(ours.safe_get_full_fp32_param(param)), ones)
    ours.safe_set_full_optimizer_state(param, 2 * ones, "exp_avg")
    assert torch.equal(value_of(ours.safe_get_full_optimizer_state(param, "exp_avg")), 2 * ones)
    assert engine.zero is not None
    local = ours.safe_get_local_optimizer_state(param, "exp_avg")
    if local is not None:
        ours.safe_set_local_optimizer_state(param, torch.full_like(local, 7.0), "exp_avg")
    assert torch.equal(value_of(ours.safe_get_full_optimizer_state(param, "exp_avg")), torch.full_like(ones, 7.0))
    if not engine.zero.explain().count("elements"):
        owns = engine.zero.owner_of(param) == setup.rank
        assert (local is not None) == owns
        assert (ours.safe_get_local_fp32_param(param) is not None) == owns
    with pytest.raises(ValueError, match="value of shape"):
        ours.safe_set_full_fp32_param(param, torch.zeros(1))
    if not engine.bfloat16_enabled():
        with pytest.raises(NotImplementedError, match="safe_set_full_fp32_param"):
            ours.safe_set_local_fp32_param(param, ones)
    run(engine, list(data(setup.rank, 2, param.dtype)))


@case(2)
def _initialize_takes_an_optimizer_a_scheduler_and_data_of_the_user(setup: Setup) -> None:
    samples = TensorDataset(*(torch.cat(parts) for parts in zip(*data(0, 5, FP32), strict=True)))
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())[:2], "lr": 0.5},
        {"params": list(model.parameters())[2:]},
    ]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    steps = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    document = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "dataloader_drop_last": True}
    engine, optimizer, loader, scheduler = ours.initialize(
        model=model, optimizer=sgd, lr_scheduler=steps, training_data=samples, config_params=document
    )
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    assert loader is not None
    assert (scheduler, len(loader), engine.train_micro_batch_size_per_gpu()) == (steps, 2, 4)
    for inputs, targets in loader:
        assert len(inputs) == 4
        engine.backward((engine(inputs) - targets).square().mean())
        engine.step()
    assert engine.get_lr() == [0.5 / 4, 0.1 / 4]
    assert type(optimizer.optim) is torch.optim.SGD
    built = start(document, optimizer=lambda params: torch.optim.Adagrad(params), lr_scheduler=lambda one: one)
    assert built.zero is not None
    assert type(built.zero.optim) is torch.optim.Adagrad
    for name in ("Lion", "Muon", "Lamb", "SGD", "adagrad", "NAdam", "torch.optim.RAdam"):
        named = start({**document, "optimizer": {"type": name, "params": {"lr": 0.01}}})
        before = [param.detach().clone() for param in named.module.parameters()]
        run(named, list(data(setup.rank, 2, FP32)))
        after = list(named.module.parameters())
        assert all(not torch.equal(one, two) for one, two in zip(before, after, strict=True)), name


@case(2)
def _communication_data_type_rounds_gradients_in_every_stage(setup: Setup) -> None:
    """In bf16: parameters end elsewhere than in fp32, and near."""
    for stage in (0, 1, 2):
        trained = []
        for more in ({}, {"communication_data_type": "bf16"}):
            engine = start({**config(stage), **more})
            run(engine, list(data(setup.rank, 3, FP32)))
            trained.append(torch.cat([param.detach().flatten() for param in engine.module.parameters()]))
        assert not torch.equal(*trained), stage
        torch.testing.assert_close(*trained, rtol=0.2, atol=0.05)


@case(2)
def _the_fp16_optimizer_has_deepspeeds_overflow_scales_rate_and_refresh(setup: Setup) -> None:
    for stage in (1, 2):
        engine = start(config(stage, FP16))
        optimizer = engine.optimizer
        assert isinstance(optimizer, EngineOptimizer)
        run(engine, list(data(setup.rank, 2, FP16)), spoils=1)
        assert (optimizer.overflow, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (True, 2.0**7, True)
        assert not engine.was_step_applied()
        optimizer.set_lr(0.5)
        assert engine.get_lr() == [0.5] == [optimizer.get_lr()]
        with torch.no_grad():
            for param in engine.module.parameters():
                param.fill_(0.125)
        optimizer.refresh_fp32_params()
        run(engine, list(data(setup.rank, 1, FP16)))
        assert not optimizer.overflow
        for param in engine.module.parameters():
            master = value_of(ours.safe_get_full_fp32_param(param))
            assert bool(((master - 0.125).abs() < 0.6).all()), "stepped from what was written, by at most the rate"
            assert torch.equal(master.half(), param)
        assert (optimizer.loss_scale, optimizer.cur_scale) == (2.0**7, 2.0**7)
        (engine(torch.ones(4, 6).half()) - 1.0).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"no gradients when the loss scale is set.*ZERO-309"):
            optimizer.loss_scale = 4.0
        engine.zero_grad()
        optimizer.loss_scale = 64.0
        assert (engine.loss_scale(), optimizer.cur_scale) == (64.0, 64.0)
        run(engine, list(data(setup.rank, 1, FP16)))
        assert not optimizer.overflow
        with pytest.raises(ValueError, match="loss scale from"):
            optimizer.loss_scale = -1.0
        for name, way in {"backward": "Call engine.backward", "loss_scaler": "cur_scale", "optimizer": "optim"}.items():
            with pytest.raises(AttributeError, match=f"got '{name}'.*{way}"):
                getattr(optimizer, name)


@case(2)
def _engine_step_in_no_sync_or_without_engine_backward_is_refused(setup: Setup) -> None:
    engine = start(config(2, rounds=2))
    inputs, targets = next(iter(data(setup.rank, 1, FP32)))
    with pytest.raises(RuntimeError, match=r"engine\.step\(\) was called inside engine\.no_sync"), engine.no_sync():
        engine.step()
    engine.step()  # ends the first of two rounds, where nothing is stepped
    (engine(inputs) - targets).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"engine\.step\(\) needs an engine\.backward"):
        engine.step()


@case(2)
def _engine_backward_of_a_loss_that_is_no_scalar_is_refused(setup: Setup) -> None:
    engine = start(config(2))
    inputs, _ = next(iter(data(setup.rank, 1, FP32)))
    with pytest.raises(ValueError, match="scalar loss"):
        engine.backward(engine(inputs))


@case(2)
def _a_batch_size_between_rounds_or_of_no_whole_rounds_is_refused(setup: Setup) -> None:
    engine = start(config(2, rounds=2))
    with pytest.raises(ConfigError, match="train_batch_size = "):
        engine.set_train_batch_size(17)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 4, 1)
    engine.set_train_batch_size(16)
    engine.step()
    with pytest.raises(RuntimeError, match="after 1 of 2 rounds of a step"):
        engine.set_train_batch_size(8)


@case(2)
def _initialize_without_its_arguments_or_with_other_parallelism_is_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError, match="FSDP2"):
        start(config(3))
    with pytest.raises(TypeError, match="one configuration"):
        ours.initialize(model=Net())
    with pytest.raises(TypeError, match="not wrapped"):
        ours.initialize(config={})
    with pytest.raises(TypeError, match='"optimizer" in the configuration'):
        start({"train_batch_size": 8})
    with pytest.raises(NotImplementedError, match=r"mpu=.* is not supported: only data parallelism"):
        start({"train_batch_size": 8}, mpu=object())


@case(2)
def _expert_parameters_are_refused_with_their_name(setup: Setup) -> None:
    """Marked as DeepSpeed marks them: on the parameter, or in its group."""
    experts = Net()
    vars(next(experts.parameters()))["allreduce"] = False
    by_key = Net()
    groups = [{"params": list(by_key.parameters())[:1], "moe": True}, {"params": list(by_key.parameters())[1:]}]
    for model, more in ((experts, {}), (by_key, {"model_parameters": groups})):
        with pytest.raises(NotImplementedError, match=r"'layers\.0\.weight'.*docs/parallel\.md"):
            start(config(1), model, **more)


@case(2)
def _a_loss_scale_without_fp16_is_refused(setup: Setup) -> None:
    engine = start(config(2))
    assert isinstance(engine.optimizer, EngineOptimizer)
    with pytest.raises(RuntimeError, match="fp16 in the configuration where a loss scale is set"):
        engine.optimizer.loss_scale = 2.0


@case(2)
def _a_bf16_model_under_an_fp32_configuration_is_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"parameters of fp32.* got layers\.0\.weight"):
        start(config(1), Net().bfloat16())


@case(2)
def _torch_autocast_equals_ddp_under_autocast(setup: Setup) -> None:
    """Parameters, gradients and the step stay fp32."""
    block = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    for stage in (0, 1, 2):
        engine = start({**config(stage, clip=0.2), **block})
        plain = Plain(Net(), FP32, stage, 1, 0.2, has_autocast=True)
        for step, (inputs, targets) in enumerate(data(setup.rank, STEPS, FP32)):
            expected = plain.train([(inputs, targets)], 1.0)
            loss = (engine(inputs) - targets).square().mean()
            engine.backward(loss)
            engine.step()
            assert torch.equal(loss, expected), (stage, step)
            assert_same(plain, engine, f"stage {stage}, step {step}")
        with torch.no_grad():
            assert not torch.equal(engine(inputs), engine.module(inputs)), "the engine's pass is less exact"


@case(2)
def _rank_0_prints_progress_times_and_memory_and_writes_csv(setup: Setup) -> None:
    document = {
        **config(1, FP16),
        "csv_monitor": {"enabled": True, "output_path": str(setup.folder), "job_name": "job"},
    }
    engine = start({**document, "wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 2})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(engine, list(data(setup.rank, 3, FP16)))
    begins = [line.split(" | ")[0] for line in printed.getvalue().splitlines()]
    expected = [
        *("step=1, time (ms)", "step=1, memory"),
        *("step=2, skipped=0, lr=[0.02], mom=[(0.9, 0.999)]", "step=2, time (ms)", "step=2, memory"),
        *("step=3, time (ms)", "step=3, memory"),
    ]
    assert begins == (expected if setup.rank == 0 else [])
    dist.barrier()
    rows = (setup.folder / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rows == ["step,lr", "8,0.02", "16,0.02", "24,0.02"]
    scales = (setup.folder / "job" / "Train_Samples_loss_scale.csv").read_text().splitlines()
    assert scales == ["step,loss_scale", "8,128.0", "16,128.0", "24,128.0"]


test_deepspeed = case.each()


def test_config_check_prints_the_batch_or_refuses_stage_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ddp_zero.__main__ import main

    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    assert main(["config", "check", str(file), "--ranks", "2"]) == 0
    assert "8 samples a step = 4 * 1 rounds * 2 ranks" in capsys.readouterr().out
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3}}))
    assert main(["config", "check", str(file), "--ranks", "2"]) == 1
    assert "FSDP2" in capsys.readouterr().err
    file.write_text(json.dumps({"train_batch_size": "auto"}))
    assert main(["config", "check", str(file), "--ranks", "2"]) == 0
    assert '"auto" is filled in' in capsys.readouterr().out
