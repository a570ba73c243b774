"""Checkpoints of DeepSpeed's last three minor versions, in one process and without DeepSpeed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW

from ddp_zero import checkpoint
from ddp_zero.checkpoint.export import export, export_deepspeed
from ddp_zero.checkpoint.foreign import deepspeed
from tests.deepspeed.write_checkpoints import STEPS, Model, groups_of
from tests.unit.checkpoint.foreign.written import EVERY, VERSIONS, expected, states_in, unpack, whole_states

FORMATS = ("last", "last_universal")
every = pytest.mark.parametrize(("version", "variant"), EVERY)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("written"))


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(written / VERSIONS[-1] / "stage2-fp16", tmp_path / "copy"))


def build(seed: int = 1) -> tuple[nn.Module, AdamW]:
    """A model and an optimizer with other values and options than those that are saved."""
    torch.manual_seed(seed)
    model = Model()
    return model, AdamW(groups_of(model), lr=9.0)


def test_files_of_the_last_three_minor_versions_are_committed() -> None:
    assert [version.rpartition(".")[0] for version in VERSIONS] == ["0.17", "0.18", "0.19"]


@every
@pytest.mark.parametrize("form", FORMATS)
def test_values_and_states_are_those_that_deepspeed_has(written: Path, version: str, variant: str, form: str) -> None:
    folder = written / version / variant
    model, opt = build()
    frozen = model.get_parameter("frozen.weight").clone()
    loaded = checkpoint.load(folder / form, model, opt, strict=False)  # into fp32: masters become the values
    assert loaded.step == STEPS
    assert all("float32, saved is" in line or "dynamic loss scale has no place" in line for line in loaded.skipped)
    params, states = expected(folder)["params"], whole_states(folder)
    assert len(params) == 5
    for name, param in model.named_parameters():
        if param.requires_grad:
            for value in (states[name]["fp32"].view_as(param), params[name]):
                torch.testing.assert_close(param.detach(), value, rtol=0, atol=0)
            state = opt.state[param]
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[key], states[name][key].view_as(param), rtol=0, atol=0)
                assert state[key].any()
            assert state["step"] == STEPS
    is_excluded = variant == "stage2-fp16"
    assert torch.equal(model.get_parameter("frozen.weight"), frozen) == is_excluded
    assert ("'frozen.weight' keeps its value: it is frozen and not saved" in loaded.notes) == is_excluded
    assert int(model.get_buffer("calls")) == STEPS
    assert [group["lr"] for group in opt.param_groups] == [0.05 * 0.9, 0.01 * 0.9]
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]


@every
def test_client_state_scheduler_and_configuration_load_as_extra(written: Path, version: str, variant: str) -> None:
    loaded = checkpoint.load(written / version / variant, build()[0], strict=False)
    extra = loaded.extra
    assert (extra["client_state"]["epoch"], extra["client_state"]["note"]) == (7, ["any", 1.5])
    assert (extra["ds_version"], extra["global_steps"]) == (version, STEPS)
    assert extra["lr_scheduler"]["last_epoch"] == STEPS
    assert extra["ds_config"]["train_micro_batch_size_per_gpu"] == 4
    scaler = extra["loss_scaler"]
    assert scaler is None if "fp32sum" in variant else scaler["dynamic"] == ("fp16" in variant)


def test_find_follows_latest_but_not_out_of_the_folder(root: Path) -> None:
    assert deepspeed.find(root) == root / "last"
    assert deepspeed.find(root / "nowhere") is None
    assert deepspeed.find(root / "last_universal") == root / "last_universal"
    (root / "latest").unlink()
    assert deepspeed.find(root) == root / "last_universal"
    for tag in ("../copy/last", "/etc", "", ".", "..", "a\0b", "x" * 300):
        (root / "latest").write_text(tag)
        (root / "latest_universal").write_text(tag)
        assert deepspeed.find(root) is None
    with pytest.raises(FileNotFoundError, match="or of DeepSpeed"):
        checkpoint.load(root, build()[0])


def test_find_ignores_a_latest_of_terabytes(tmp_path: Path) -> None:
    with (tmp_path / "latest").open("wb") as file:
        file.truncate(1 << 42)
    assert deepspeed.find(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "got stage 3. Convert it"),
        ("mp_rank_01_model_states.pt", "only data parallelism is read"),
        ("layer_00-model_00-model_states.pt", "only data parallelism is read"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "only data parallelism is read"),
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", r"of 2 ranks .* got those of \[0, 1, 2\]"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "a file of the optimizer for each of 2 ranks"),
    ],
)
def test_files_of_other_parallelism_or_of_more_ranks_are_refused(root: Path, name: str, said: str) -> None:
    (root / "last" / name).write_bytes(b"")
    with pytest.raises(ValueError, match=said):
        checkpoint.load(root, build()[0])


def test_a_missing_rank_state_or_parameter_is_refused(root: Path) -> None:
    (root / "last" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(root / "away.pt")
    with pytest.raises(ValueError, match=r"for each of 2 ranks .* got those of \[0\]"):
        checkpoint.load(root, build()[0])
    shutil.copy(
        root / "last" / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        root / "last" / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(
        ValueError, match=r"got 'body.weight' of rank 1 at \(0, 84\)"
    ):  # some elements twice, others never
        checkpoint.load(root, build()[0])
    (root / "last_universal" / "zero" / "body.weight" / "fp32.pt").unlink()
    with pytest.raises(ValueError, match=r"Expected fp32.pt of 'body.weight'"):
        checkpoint.load(root / "last_universal", build()[0])


def test_damage_is_refused_before_anything_changes(root: Path) -> None:
    path = root / "last" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = path.read_bytes()
    model, opt = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused = 0
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        try:
            checkpoint.load(root, model, opt, strict=False)
        except ValueError:
            refused += 1
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert not opt.state
        else:
            assert all(value.isfinite().all() for value in model.state_dict().values())
            model, opt = build()  # padding, or a field of the zip archive that says nothing of its content
    assert refused > len(whole) / 97 / 2


def test_a_client_state_with_an_object_of_another_class_is_refused(root: Path) -> None:
    path = root / "last" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "mine": Path("x")}, path)
    with pytest.raises(ValueError, match=r"model_states.pt, got the name pathlib.*save plain values"):
        checkpoint.load(root, build()[0])


def test_another_class_and_parameters_frozen_in_the_checkpoint_are_refused(root: Path) -> None:
    model, _ = build()
    with pytest.raises(ValueError, match=r"the optimizer is torch.optim.sgd.SGD, saved is torch.optim.Adam"):
        checkpoint.load(root, model, SGD(groups_of(model), lr=1.0))
    (root / "last" / "mp_rank_00_model_states.pt").touch()
    model.get_parameter("frozen.weight").requires_grad_(True)
    with pytest.raises(ValueError, match=r"'frozen.weight' of the model is not in the checkpoint"):
        checkpoint.load(root, model)


# Export


def test_weights_in_fp32_are_those_of_the_masters(written: Path, tmp_path: Path) -> None:
    folder = written / VERSIONS[-1] / "stage1-bf16"
    export(folder, tmp_path / "plain", fp32=True)
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(found) == set(Model().state_dict())
    for name, param in expected(folder)["params"].items():
        torch.testing.assert_close(found[name], param, rtol=0, atol=0)
    assert not torch.equal(found["body.weight"], found["body.weight"].bfloat16().float())
    assert found["head.weight"].equal(found["embed.weight"])
    assert (found["calls"].dtype, found["frozen.weight"].dtype) == (torch.int64, torch.float32)


def test_an_export_without_frozen_weights_has_all_others_and_all_states(written: Path, tmp_path: Path) -> None:
    folder = written / VERSIONS[-1] / "stage1-bf16"
    export(folder, tmp_path, exclude_frozen=True)
    found = load_file(tmp_path / "model.safetensors")
    assert set(Model().state_dict()) - set(found) == {"frozen.weight", "frozen.bias"}
    assert found["body.weight"].dtype == torch.bfloat16
    states = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    assert len(states) == len(expected(folder)["params"])


def test_an_export_to_deepspeeds_format_loads_back_equal(tmp_path: Path) -> None:
    model, opt = build(seed=3)
    for _ in range(2):
        model(torch.arange(8)).backward()
        opt.step()
    checkpoint.save(tmp_path / "ours", model, opt, step=12).wait()
    out = export_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "latest_universal").read_text() == out.name == "step-00000012_universal"
    state = torch.load(out / "mp_rank_00_model_states.pt", weights_only=True)
    assert (state["global_steps"], state["skipped_steps"]) == (12, 0)
    assert state["lr_scheduler"] == {"last_batch_iteration": 11, "last_epoch": 12}
    other, its_opt = build(seed=4)
    loaded = checkpoint.load(tmp_path / "theirs", other, its_opt)
    assert (loaded.step, loaded.skipped, loaded.notes) == (12, (), ())
    for (name, value), (_, again) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(value, again), name
    ours, theirs = opt.state_dict(), its_opt.state_dict()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    with pytest.raises(FileExistsError):
        export_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    checkpoint.save(tmp_path / "model", model).wait()
    with pytest.raises(ValueError, match="has a model only, and no optimizer"):
        export_deepspeed(tmp_path / "model", tmp_path / "more")


def test_names_of_parameters_come_after_the_options_of_their_group(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ours", *build(), step=1).wait()
    out = export_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    state = torch.load(out / "zero" / "optimizer_state.pt", weights_only=True)
    state["param_groups"] = [{"params": [0], **group, "lr": 0.5} for group in state["param_groups"]]
    torch.save(state, out / "zero" / "optimizer_state.pt")
    found = deepspeed.read(out).groups
    assert [group["lr"] for group in found] == [0.5, 0.5]
    assert [list(group).index("params") for group in found] == [len(group) - 1 for group in found]


def test_export_of_an_engine_checkpoint_keeps_tag_scheduler_and_counters(tmp_path: Path) -> None:
    model, opt = build(seed=3)
    model(torch.arange(8)).backward()
    opt.step()
    counters = {"global_steps": 7, "skipped_steps": 2, "global_samples": 56, "micro_steps": 14}
    extra = {"engine": counters, "scheduler": {"last_batch_iteration": 4}, "client_state": {"rng": torch.arange(3)}}
    for tag in ("first", "second"):
        checkpoint.save(tmp_path / "saved" / tag, model, opt, extra=extra).wait()
        out = export_deepspeed(tmp_path / "saved" / tag, tmp_path / "theirs")
        assert (tmp_path / "theirs" / "latest_universal").read_text() == out.name == f"{tag}_universal"
        state = torch.load(out / "mp_rank_00_model_states.pt", weights_only=True)
        assert (state["global_steps"], state["skipped_steps"], state["global_samples"]) == (7, 2, 56)
        assert state["lr_scheduler"] == {"last_batch_iteration": 4}
        assert state["rng"].tolist() == [0, 1, 2]


@every
def test_export_equals_the_output_of_deepspeeds_own_converter(
    written: Path, tmp_path: Path, version: str, variant: str
) -> None:
    folder = written / version / variant
    converted, its_own = states_in(export_deepspeed(folder / "last", tmp_path / "out")), whole_states(folder)
    assert len(converted) == 5
    others = {
        "head.weight",
        "shift",
        "calls",
        "frozen.weight",
        "frozen.bias",
    }  # DeepSpeed 0.19 also writes what is in the file of the model
    assert set(its_own) - set(converted) <= others
    for name, states in its_own.items():
        if name in others:
            continue
        assert set(states) <= set(converted[name]), name
        for key, value in states.items():
            flat = torch.as_tensor(converted[name][key]).reshape(-1)
            torch.testing.assert_close(flat, torch.as_tensor(value).reshape(-1), rtol=0, atol=0, check_dtype=False)


def test_export_and_info_read_deepspeed_folders(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from ddp_zero.__main__ import main

    folder = str(written / VERSIONS[-1] / "stage1-bf16")
    monkeypatch.setattr(
        "sys.argv", ["x", "checkpoint", "export", folder, str(tmp_path / "a"), "--format=deepspeed-universal"]
    )
    assert main() == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / f"step-{STEPS:08d}_universal")
    for path in (folder, str(tmp_path / "a")):
        monkeypatch.setattr("sys.argv", ["x", "checkpoint", "info", path, "--verify"])
        assert main() == 0
        out = capsys.readouterr().out
        for line in ("written by    DeepSpeed 0.19", "step          3", "state         of 5 parameters: "):
            assert f"  {line}" in out, (line, out)
        assert "everything fits its checksums" in out
    monkeypatch.setattr(
        "sys.argv", ["x", "checkpoint", "export", folder, str(tmp_path / "b"), "--fp32", "--exclude-frozen"]
    )
    assert main() == 0
    assert set(json.loads((tmp_path / "b" / "model.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}")) >= {
        "shift"
    }
    monkeypatch.setattr(
        "sys.argv", ["x", "checkpoint", "export", folder, "c", "--fp32", "--format=deepspeed-universal"]
    )
    assert main() == 1
