"""What works today, each with the tests that show it: the source of docs/status.md.

``python -m tests.features`` writes that page; a test fails when they differ.
"""

from pathlib import Path

STATUS = Path(__file__).parent.parent / "docs" / "status.md"
_HEADER = """\
# Status

What works today, and the test that shows it. For what does not work, see [limits](limits.md).

`python -m tests.features` writes this page from `tests/features.py`, where the column *works* is typed by hand.
`pytest tests/multiproc/test_readme.py` fails when the two differ, or when a test named here does not exist.

| what | works | shown by |
| --- | --- | --- |
"""

_HERE = "tests/multiproc/"
PARITY = _HERE + "test_parity.py::test_every_optimizer_equals_ddp_with_the_plain_one"
PARAMETERS = _HERE + "test_parameters.py::test_parameters"
STATE = _HERE + "test_state.py::test_state"
RESUME = _HERE + "test_state.py::test_a_checkpoint_continues_bit_for_bit_at_any_world_size"
GROUPS = _HERE + "test_behaviour.py::test_groups_whose_ranks_are_not_those_of_the_job"
WIRE = _HERE + "test_behaviour.py::test_a_sync_sends_n_minus_1_nth_of_the_parameter_bytes_per_rank"
JOIN = _HERE + "test_join.py::test_join_with_ddp_equals_the_plain_optimizer"
MISUSE = _HERE + "test_misuse.py::test_misuse"
DEAD = _HERE + "test_misuse.py::test_the_others_raise_within_the_time_out_and_name_the_rank"
OVERLAP = _HERE + "test_overlap_parity.py::test_overlap_parity"
SITUATIONS = _HERE + "test_overlap.py::test_overlap"
DELAYS = _HERE + "test_event_order.py::test_delays_change_neither_order_nor_numbers"
_STAGE_2 = _HERE + "test_stage2.py::"
SITUATIONS_2 = _STAGE_2 + "test_what_holds_for_stage_1_holds_for_stage_2"
MEMORY_2 = _STAGE_2 + "test_a_step_holds_three_bucket_buffers_and_its_own_shard_only_where_the_step_waits"
WIRE_2 = _STAGE_2 + "test_a_step_sends_2_n_minus_1_nths_of_the_parameter_bytes"
STAGE_2 = _STAGE_2 + "test_stage_2"
_FORWARD = _HERE + "test_sync_forward.py::"
IN_FORWARD = _FORWARD + "test_every_mode_equals_ddp_with_the_plain_optimizer"
USES = _FORWARD + "test_whoever_uses_a_parameter_waits_for_it"
RECIPES = _HERE + "test_recipes.py::test_a_step_that_needs_all_gradients_equals_ddp_with_torchs_own_parts"
DECIDE = _HERE + "test_decision.py::test_decision"
CHECKPOINT = _HERE + "test_checkpoint.py::test_checkpoint"
_RESUME = _HERE + "test_checkpoint_resume.py::"
RESUMES = _RESUME + "test_every_mode_and_world_size_resumes_every_other_bit_for_bit"
KILLED = _RESUME + "test_a_rank_killed_at_any_moment_leaves_a_checkpoint_that_continues_as_if_nothing_had_happened"
HOSTILE = _HERE + "test_hostile_checkpoints.py::test_hostile_checkpoints_are_refused_and_change_nothing"
KILLED_GPT = _HERE + "test_train_gpt.py::test_a_killed_run_ends_as_the_unbroken_one_at_any_number_of_ranks"
BETWEEN = _HERE + "test_between.py::test_between"
COUPLED = _HERE + "test_coupling.py::test_an_optimizer_that_couples_parameters_is_refused_on_every_rank"
FORWARDED = _HERE + "test_forwarding.py::test_train_and_eval_equal_the_plain_optimizers"
FAILURES = _HERE + "test_failures.py::test_an_error_of_one_rank_is_raised_on_all"
RESTART = _HERE + "test_restart.py::test_a_killed_worker_comes_back_and_ends_bit_equal"
FUZZ = _HERE + "test_fuzz.py::test_a_handful_of_cases"
CUDA = "tests/gpu/test_cuda.py::test_equal_on_a_gpu"

FEATURES: list[tuple[str, str, str]] = [
    ("Every `torch.optim` class for dense gradients except LBFGS: bit-equal to DDP + the plain one", "yes", PARITY),
    ("Optimizers of other libraries (per-parameter norms, 8-bit state, counters in groups)", "yes", PARITY),
    ("Parameter groups, schedulers, options changed or added at any time", "yes", PARAMETERS),
    ("Mixed dtypes, complex, zero-element, channels-last, tied, missing gradients", "yes", PARAMETERS),
    ("Freezing and unfreezing between steps; frozen parameters are not sent", "yes", PARAMETERS),
    ("`add_param_group` at any time, without moving state", "yes", PARAMETERS),
    ("Sub-groups such as ranks [2, 3] of 4", "yes", GROUPS),
    ("A sync sends (N - 1)/N of the parameter bytes per rank", "yes", WIRE),
    ("State bytes per rank within one parameter of 1/N", "yes", STATE),
    ("Consolidated state dict identical to the plain optimizer's, also in order; no pickle", "yes", STATE),
    ("Checkpoints to and from the plain optimizer, torch's, and any number of ranks", "yes", RESUME),
    ("`Join([ddp, opt])` and `Join([opt])` with uneven inputs", "yes", JOIN),
    ("Ranks that differ in parameters, or fail, are named on every rank; nothing hangs", "yes", MISUSE),
    ("A dead or stuck rank raises on the others within the group's time-out", "yes", DEAD),
    ("Step inside backward, split or whole buckets, interleaved or not: bit-equal from the first step", "yes", OVERLAP),
    (
        "... with any wrapped hook, `no_sync`, closures, checkpointing, `torch.compile`, Join, added groups",
        "yes",
        SITUATIONS,
    ),
    ("... with the same order of messages under 200 random delay schedules", "yes", DELAYS),
    ("Stage 2: bit-equal to DDP at 2 ranks; at 3 and 4 to DDP with a sum in rank order", "yes", OVERLAP),
    (
        "... in the situations of stage 1: Join, `no_sync`, static graph, checkpointing, `torch.compile`",
        "yes",
        SITUATIONS_2,
    ),
    (
        "... gradients need three buffers of the largest bucket, and the rank's shard where the step waits",
        "yes",
        MEMORY_2,
    ),
    ("... a step sends 2 (N - 1)/N of the parameter bytes per rank", "yes", WIRE_2),
    (
        "... `accumulate()`, `full_grad`, `clip_grad_norm_`, bf16 gradients on the wire, unused parameters",
        "yes",
        STAGE_2,
    ),
    ("... a partial norm of the gradients is refused, with the remedy", "yes", STAGE_2),
    ('`sync="forward"`: a sync may outlast its step; every mode bit-equal', "yes", IN_FORWARD),
    ("... any access to a parameter waits: layers, `state_dict`, averages, writes, copies, collectives", "yes", USES),
    (
        "Clipping, `GradScaler` with overflows, own loss scale, fp32 masters, accumulation: bit-equal in every mode",
        "yes",
        RECIPES,
    ),
    (
        "... an inf or NaN on one rank: nothing is stepped anywhere; `opt.last_step` names where it was",
        "yes",
        DECIDE,
    ),
    ("... clipped or unscaled in the loop with overlap: the first step and all later ones wait", "yes", DECIDE),
    ("... the same decision under `Join`, with unused parameters, and where a rank owns nothing", "yes", DECIDE),
    ("Sharded checkpoints: stages 1 and 2 and plain at 1 to 4 ranks resume each other bit for bit", "yes", RESUMES),
    (
        "... SIGKILL at 50 random moments: a complete checkpoint always exists, and continues",
        "yes",
        KILLED,
    ),
    (
        "... a GPT killed in training and resumed at a different number of ranks prints the same losses",
        "yes",
        KILLED_GPT,
    ),
    ("... hostile files, also with matching checksums, are refused before anything is changed", "yes", HOSTILE),
    ("... in the background; memory of the shard and one tensor; what does not fit is listed", "yes", CHECKPOINT),
    (
        "... read by `torch.distributed.checkpoint`; torch's `get_optimizer_state_dict`",
        "yes",
        CHECKPOINT,
    ),
    (
        "Options, parameters, state changed between `backward()` and `opt.step()`: as a plain loop, or an error",
        "yes",
        BETWEEN,
    ),
    ("Gradients that nothing has averaged (all passes under `no_sync()`) are refused", "yes", BETWEEN),
    ("Optimizers that couple parameters raise on every rank; `check_shardable`", "yes", COUPLED),
    ("`train()`, `eval()` and other methods of the inner class act on all ranks", "yes", FORWARDED),
    ("An error of one rank's local step is raised on all ranks, with its text", "yes", FAILURES),
    ("A job that `torchrun` restarts ends as an unbroken one", "yes", RESTART),
    ("Random programs, compared with DDP + the plain optimizer after every step", "yes", FUZZ),
    ("LBFGS, sparse gradients", "no: clear error", MISUSE),
    ("Complex parameters with overlap or stage 2", "no: clear error", STAGE_2),
    ("NCCL, CUDA", "never run yet", CUDA),
]


def render() -> str:
    """The page as Markdown."""
    rows = [f"| {what} | {works} | {f'`{test}`' if test else ''} |\n" for what, works, test in FEATURES]
    return _HEADER + "".join(rows)


if __name__ == "__main__":
    STATUS.write_text(render())
