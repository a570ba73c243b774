"""What works today, each with the tests that show it: the source of docs/status.md.

``pytest --write-status`` writes that page from the outcomes of the tests that it has run; any run fails that finds a
claim of the page without a test that passes. See `tests/conftest.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

STATUS = Path(__file__).parent.parent / "docs" / "status.md"
_HEADER = """\
# Status

Each feature with the test that shows it. Known limits: [limits](limits.md).

`pytest --write-status` writes this page: *works* is the outcome of the test in the row, on the machine of that run. Any
run of the tests fails if a claim of the page is not shown; *nightly* claims are shown by `pytest -m nightly` only.

| feature | works | shown by |
| --- | --- | --- |
"""

VERSIONS = "\n## Versions of torch and of Python\n"
"""Where the part of the page begins that `tests/versions.py` writes."""

_HERE = "tests/multiproc/"
PARITY = _HERE + "test_parity.py::test_every_optimizer_equals_ddp_with_the_plain_one"
PARAMETERS = _HERE + "test_parameters.py::test_parameters"
STATE = _HERE + "test_state.py::test_state"
ON_DEMAND = _HERE + "test_state_on_demand.py::test_state_on_demand"
ON_DEMAND_GONE = _HERE + "test_state_on_demand.py::test_a_rank_that_is_gone_is_named_within_the_time_out"
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
SITUATIONS_2 = _STAGE_2 + "test_stage_2"
MEMORY_2 = _STAGE_2 + "test_a_step_holds_three_bucket_buffers_and_its_own_shard_only_where_the_step_waits"
WIRE_2 = _STAGE_2 + "test_a_step_sends_2_n_minus_1_nths_of_the_parameter_bytes"
STAGE_2 = _STAGE_2 + "test_stage_2"
ZEROED = _HERE + "test_zeroed.py::test_zeroed"
OWNED_GRADIENTS = _HERE + "test_owned_gradients.py::test_owned_gradients"
ELEMENTS = _HERE + "test_elements.py::test_elements"
NATIVE = _HERE + "test_native.py::test_native"
EIGHT = _HERE + "test_elements.py::test_eight_ranks_share_one_large_parameter_within_two_percent"
CHECKPOINTS_OF_PARTS = _HERE + "test_elements.py::test_checkpoints_fit_any_partition_and_any_number_of_ranks"
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
LOOPS = _HERE + "test_loops.py::test_loops"
GUIDE_LOOPS = _HERE + "test_guide_loops.py::test_guide_loops"
BETWEEN = _HERE + "test_between.py::test_between"
COUPLED = _HERE + "test_coupling.py::test_an_optimizer_that_couples_parameters_is_refused_on_every_rank"
FORWARDED = _HERE + "test_forwarding.py::test_forwarding"
FAILURES = _HERE + "test_failures.py::test_an_error_of_one_rank_is_raised_on_all"
DEEPSPEED_FILES = _HERE + "test_deepspeed_checkpoints.py::test_checkpoints_of_deepspeed_load_into_every_mode"
_FOREIGN = "tests/unit/checkpoint/foreign/"
UNIVERSAL = _FOREIGN + "test_deepspeed.py::test_a_checkpoint_of_this_library_goes_to_deepspeeds_format_and_back"
HOSTILE_PICKLES = _FOREIGN + "test_torch_file.py::test_names_that_are_not_known_are_refused"
LAUNCH = _HERE + "test_launch.py::test_a_job_on_this_machine_gives_its_exit_code_and_leaves_nobody"
RESTART = _HERE + "test_restart.py::test_a_killed_worker_comes_back_and_ends_bit_equal"
ESTIMATE = _HERE + "test_estimate.py::test_estimate"
OFFLOAD = _HERE + "test_offload.py::test_offload"
SHARD_GROUPS = _HERE + "test_groups.py::test_groups"
LOST_REPLICA = _HERE + "test_groups.py::test_a_killed_rank_of_another_replica_is_told_within_the_time_out"
RESUMES_GROUPS = (
    _HERE + "test_groups.py::test_a_checkpoint_of_groups_is_whole_and_resumes_without_groups_and_at_other_sizes"
)
DEEPSPEED = _HERE + "test_deepspeed.py::test_deepspeed"
INSIGHT = _HERE + "test_insight.py::test_insight"
LOST = _HERE + "test_insight.py::test_the_records_name_the_rank_that_was_lost"
MISSING = _HERE + "test_missing.py::test_peers_name_the_rank_that_is_missing"
WAITS = _HERE + "test_failures.py::test_waits_of_dropped_iterations_close_no_connection"
FUZZ = _HERE + "test_fuzz.py::test_a_handful_of_cases"
FUZZED_LOOPS = _HERE + "test_fuzz_loops.py::test_a_handful_of_loops"
FUZZ_MESH = _HERE + "test_fuzz_mesh.py::test_a_handful_of_mesh_cases"
PARALLEL = _HERE + "test_parallel.py::test_parallel"
MESHES = _HERE + "test_parallel_meshes.py::test_meshes"
STAGES = _HERE + "test_parallel_stages.py::test_stages"
TWO_MODELS = _HERE + "test_parallel_two_models.py::test_two_models"
PARALLEL_ERRORS = _HERE + "test_parallel_errors.py::test_errors"
PARALLEL_STATE = _HERE + "test_parallel_state.py::test_parallel_state"
PARALLEL_OPTIONS = _HERE + "test_parallel_options.py::test_parallel_options"
PARALLEL_SCALER = _HERE + "test_parallel_scaler.py::test_parallel_scaler"
SCHEDULES = _HERE + "test_parallel_schedules.py::test_schedules"
JOIN_STAGES = _HERE + "test_parallel_join_stages.py::test_parallel_join_stages"
PARALLEL_JOIN = _HERE + "test_parallel_join.py::test_parallel_join"
ADDED_GROUPS = _HERE + "test_parallel_added_groups.py::test_parallel_added_groups"
PARALLEL_REPLICAS = _HERE + "test_parallel_replicas.py::test_parallel_replicas"
CUDA = "tests/gpu/test_cuda.py::test_equal_on_a_gpu"

YES, NIGHTLY, REFUSED, NOT_RUN = "yes", "yes, nightly", "no: clear error", "not run"

WHOLE = _HERE + "test_parallel_whole.py::test_parallel_whole"
WHOLE_WITH_OPTIONS = _HERE + "test_parallel_whole_options.py::test_parallel_whole_options"
INSTANCES = _HERE + "test_instances.py::test_instances"
COPIES = _HERE + "test_copies.py::test_copies"
MIXED = _HERE + "test_mixed.py::test_mixed"
SEVERAL = _HERE + "test_several_optimizers.py::test_several_optimizers"
UNUSED = _HERE + "test_unused.py::test_unused"
COSTS = "tests/unit/core/plan/test_weighted.py::test_the_slowest_rank_has_its_share_of_the_cost"

FEATURES: list[tuple[str, str, str]] = [
    ("Every `torch.optim` class for dense gradients except LBFGS: bit-equal to DDP + the plain one", YES, PARITY),
    ("Optimizers of other libraries (per-parameter norms, 8-bit state, counters in groups)", YES, PARITY),
    ("Muon for matrices and AdamW for the rest in one optimizer: bit-equal to the plain pair", YES, MIXED),
    ("Several optimizers of stage 2 over one DDP model: bit-equal to as many plain ones", YES, SEVERAL),
    ("A step inside backward with unused parameters: dynamic and static graphs, cut, under `Join`", YES, UNUSED),
    (
        "Optimizers that were built already, fresh or in the middle of a run: handed over, they go on bit for bit",
        YES,
        INSTANCES,
    ),
    ("Whole parameters dealt by the cost of their step, within a bound on bytes", YES, COSTS),
    ("Matrices that tensor parallelism cuts, stepped whole on one of their ranks: the bits of one device", YES, WHOLE),
    (
        '... parts of any sizes, with `Join`, `GradScaler`, `offload=`, `sync="forward"`, `shard_group=`: same bits',
        YES,
        WHOLE_WITH_OPTIONS,
    ),
    (
        "... checkpoints and snapshots of them resume on other meshes and on one device, and back, bit for bit",
        YES,
        WHOLE,
    ),
    ("Parameter groups, schedulers, options changed or added at any time", YES, PARAMETERS),
    ("Mixed dtypes, complex, zero-element, channels-last, tied, missing gradients", YES, PARAMETERS),
    ("Freezing and unfreezing between steps; frozen parameters are not sent", YES, PARAMETERS),
    ("`add_param_group` at any time, without moving state", YES, PARAMETERS),
    ("Sub-groups such as ranks [2, 3] of 4", YES, GROUPS),
    ("A sync sends (N - 1)/N of the parameter bytes per rank", YES, WIRE),
    ("State bytes per rank within one parameter of 1/N", YES, STATE),
    ("Consolidated state dict identical to the plain optimizer's, also in order; no pickle", YES, STATE),
    ("`state_dict()` on any ranks alone; `load_state_dict()` from one rank; all or none", YES, ON_DEMAND),
    ("... a rank that is killed, stopped or stuck in a step is named within the time-out", YES, ON_DEMAND_GONE),
    ("Checkpoints to and from the plain optimizer, torch's, and any number of ranks", YES, RESUME),
    ("`Join([ddp, opt])` and `Join([opt])` with uneven inputs", YES, JOIN),
    ("Ranks that differ in parameters, or fail, are named on every rank; nothing hangs", YES, MISUSE),
    ("A dead or stuck rank raises on the others within the group's time-out", YES, DEAD),
    ("Step inside backward, split or whole buckets, interleaved or not: bit-equal from the first step", YES, OVERLAP),
    (
        "... `deepcopy`, pickle, `torch.save` and `AveragedModel` of the DDP model: copies train as plain DDP does",
        YES,
        COPIES,
    ),
    (
        "... with any wrapped hook, `no_sync`, closures, checkpointing, `torch.compile`, Join, added groups",
        YES,
        SITUATIONS,
    ),
    ("... with the same order of messages under random delay schedules", YES, DELAYS),
    ("Stage 2: bit-equal to DDP at 2 ranks; at 3 and 4 to DDP with a sum in rank order", YES, OVERLAP),
    (
        "... in the situations of stage 1: Join, `no_sync`, static graph, checkpointing, `torch.compile`",
        YES,
        SITUATIONS_2,
    ),
    (
        "... gradients need three buffers of the largest bucket, and the rank's shard where the step waits",
        YES,
        MEMORY_2,
    ),
    ("... a step sends 2 (N - 1)/N of the parameter bytes per rank", YES, WIRE_2),
    (
        "... `accumulate()`, `full_grad`, `clip_grad_norm_`, bf16 gradients on the wire, unused parameters",
        YES,
        STAGE_2,
    ),
    ("... over some of the parameters that DDP reduces; the others keep whole averages", YES, STAGE_2),
    (
        "... with or without bucket views, and from the first iteration on in the memory of later ones",
        YES,
        "tests/multiproc/test_memory.py::test_the_first_iteration_needs_no_more_than_its_shard_of_gradients_on_top",
    ),
    ("... gradients set to zero instead of dropped, in any way and at any place, with local passes too", YES, ZEROED),
    ("... a partial norm of the gradients is refused, with the remedy", YES, STAGE_2),
    ("Gradients changed element by element: `opt.owned_gradients()`, `opt.clip_grad_value_()`", YES, OWNED_GRADIENTS),
    ('`partition="elements"`: cut parameters in both stages, bit-equal, with the plain state dict', YES, ELEMENTS),
    (
        '... `partition="auto"`: equal parts where they shorten a step and change no bit',
        YES,
        NATIVE,
    ),
    (
        "... a reduce-scatter and an all-gather per bucket, without a copy, as on NCCL (run on Gloo)",
        YES,
        NATIVE,
    ),
    ("... state and messages within 2% of 1/8 where one parameter is 90% of the model", YES, EIGHT),
    (
        "... checkpoints that either partition and the plain optimizer load at any number of ranks",
        YES,
        CHECKPOINTS_OF_PARTS,
    ),
    (
        "`offload=`: state and step on the host, bit-equal in every mode (a stand-in for a device)",
        YES,
        OFFLOAD,
    ),
    ("`ddp_zero.estimate`: bytes of parameters, masters, state and gradients as ranks then hold them", YES, ESTIMATE),
    ("`shard_group=`: shard within groups, replicate across; replicas bit-equal after every step", YES, SHARD_GROUPS),
    ("... checkpoints resume without groups and at other numbers of ranks", YES, RESUMES_GROUPS),
    ("... a rank lost in another group raises within the time-out", YES, LOST_REPLICA),
    ("A lost rank is named by its peers in stage 1, too, but for DDP's own errors with `overlap=False`", YES, MISSING),
    ("Iterations dropped by exceptions leave the connections of rings and shard groups open", YES, WAITS),
    ('`sync="forward"`: a sync may outlast its step; every mode bit-equal', YES, IN_FORWARD),
    ("... any access to a parameter waits: layers, `state_dict`, averages, writes, copies, collectives", YES, USES),
    (
        "Clipping, `GradScaler` with overflows, own loss scale, fp32 masters, accumulation: bit-equal in every mode",
        YES,
        RECIPES,
    ),
    (
        "... an inf or NaN on one rank: nothing is stepped anywhere; `opt.last_step` names where it was",
        YES,
        DECIDE,
    ),
    ("... clipped or unscaled in the loop with overlap: the first step and all later ones wait", YES, DECIDE),
    ("... the same decision under `Join`, with unused parameters, and where a rank owns nothing", YES, DECIDE),
    ("Sharded checkpoints: stages 1 and 2 and plain at 1 to 4 ranks resume each other bit for bit", YES, RESUMES),
    (
        "... SIGKILL at random moments: a complete checkpoint always exists, and continues",
        YES,
        KILLED,
    ),
    (
        "... a GPT killed in training and resumed at a different number of ranks prints the same losses",
        YES,
        KILLED_GPT,
    ),
    ("... hostile files, also with matching checksums, are refused before anything is changed", YES, HOSTILE),
    ("... in the background; memory of the shard and one tensor; values that do not fit are listed", YES, CHECKPOINT),
    (
        "... read by `torch.distributed.checkpoint`; torch's `get_optimizer_state_dict`",
        YES,
        CHECKPOINT,
    ),
    (
        "Options, parameters, state changed between `backward()` and `opt.step()`: as a plain loop, or an error",
        YES,
        BETWEEN,
    ),
    ("Gradients that nothing has averaged (all passes under `no_sync()`) are refused", YES, BETWEEN),
    (
        "... without DDP, around its forward pass, of replaced or converted parameters; averages by hand work",
        YES,
        LOOPS,
    ),
    ("Edits through `grad.data`, updates that a loop drops, saves on one rank, steps without gradients", YES, LOOPS),
    ("A GAN with several passes before a step; training that goes on after an exception in backward", YES, GUIDE_LOOPS),
    ("Optimizers that couple parameters raise on every rank; `check_shardable`", YES, COUPLED),
    ("`train()`, `eval()` and other methods of the inner class act on all ranks", YES, FORWARDED),
    ("An error of one rank's local step is raised on all ranks, with its text", YES, FAILURES),
    ("DeepSpeed's engine calls in stages 0, 1 and 2, fp32, bf16 and fp16: bit-equal to DDP", YES, DEEPSPEED),
    ("Checkpoints of DeepSpeed 0.17 to 0.19 load into every mode, and train on with its losses", YES, DEEPSPEED_FILES),
    (
        "... of the Trainer with DeepSpeed, in `ZeroTrainer(zero=...)`: its losses, norms and rates",
        NIGHTLY,
        "tests/frameworks/test_transformers_config.py::test_transformers_config",
    ),
    ("... and back, in its universal format", YES, UNIVERSAL),
    ("... hostile pickles in them are refused, and nothing in them is run", YES, HOSTILE_PICKLES),
    ("`python -m ddp_zero launch` on one machine: true exit codes, and nobody left behind", YES, LAUNCH),
    ("A job that `torchrun` restarts ends as an unbroken one", YES, RESTART),
    (
        "`opt.stats()`: bytes as counted, numbers unchanged; `Monitor`; `opt.check_agreement()` names the rank",
        YES,
        INSIGHT,
    ),
    (
        "... flight records of a killed and a stopped rank: `postmortem` names the rank, the bucket and the message",
        YES,
        LOST,
    ),
    (
        "... 14 staged hangs in stages 1 and 2: `postmortem` names the rank, or says why it cannot",
        YES,
        _HERE + "test_staged_hangs.py::test_the_rank_that_caused_it_is_named",
    ),
    ("Experts spread over ranks, stages 1 and 2: bit-equal to the plain optimizer", YES, PARALLEL),
    ("... norms of one device to 1e-6, one skip for all, ranks that differ are named", YES, PARALLEL),
    ("... a second DDP model over the experts; experts that no token reaches there", YES, TWO_MODELS),
    ("Tensor parallel parameters, cut by hand or `DTensor`; pipeline stages with a tied embedding", YES, MESHES),
    ("... stages under GPipe and 1F1B, in DDP or not, stages 1 and 2: bit-equal to the plain optimizer", YES, STAGES),
    ("... an error of one rank's optimizer raises on all ranks at once", YES, PARALLEL_ERRORS),
    ("... all schedules of torch, several stages on a rank; those that pass DDP by are refused", YES, SCHEDULES),
    ("... `Join` over data x tensor, and experts: bit-equal; a peer that leaves alone is named", YES, PARALLEL_JOIN),
    ("... `Join` with pipelines, DDP in stages or not, whichever the schedule", YES, JOIN_STAGES),
    ('... `offload=`, and `sync="forward"`: bit-equal to the plain optimizer', YES, PARALLEL_OPTIONS),
    (
        "... `torch.amp.GradScaler`: all ranks skip together, with the bits of a scaler that sees all gradients",
        YES,
        PARALLEL_SCALER,
    ),
    (
        "... `add_param_group`: experts, parts, stages and thawed layers, with the bits of the plain optimizer",
        YES,
        ADDED_GROUPS,
    ),
    (
        "... `shard_group=`: state sharded over some data-parallel ranks and replicated over the rest: bit-equal",
        YES,
        PARALLEL_REPLICAS,
    ),
    (
        "... checkpoints at other numbers of expert, tensor and data-parallel ranks and stages; of torch's own format",
        YES,
        PARALLEL_STATE,
    ),
    (
        "... an expert, part or stage that could be taken for another one is refused, naming it and the ranks",
        YES,
        PARALLEL_STATE,
    ),
    ("Random programs, compared with DDP + the plain optimizer after every step", YES, FUZZ),
    (
        "Random loops as people write them: equal to DDP + the plain optimizer, or refused by a fitting code",
        YES,
        FUZZED_LOOPS,
    ),
    (
        "Training scripts (GPT, diffusion, DINO, GAN, PPO, timm) in every mode, resumed: equal to DDP, or refused",
        NIGHTLY,
        "tests/scripts/test_scripts.py::test_scripts",
    ),
    (
        "... of transformers' Trainer and accelerate",
        NIGHTLY,
        "tests/scripts/test_frameworks.py::test_scripts_of_frameworks",
    ),
    (
        "... at most 3 changed lines for stage 1, and 5 for stage 2",
        NIGHTLY,
        "tests/scripts/test_scripts.py::test_changed_lines",
    ),
    ("Random mesh programs, compared with plain optimizers and one device after every step", YES, FUZZ_MESH),
    ("LBFGS, sparse gradients", REFUSED, MISUSE),
    ("Complex parameters with overlap or stage 2", REFUSED, STAGE_2),
    ("NCCL, CUDA: run by hand on [one GPU](accelerators.md#on-one-gpu)", NIGHTLY, CUDA),
]


def claims_of(page: str) -> dict[str, str]:
    """What the page says of each feature."""
    rows = re.findall(r"^\| (.+) \| ([^|]+) \| `[^`]+` \|$", page, re.MULTILINE)
    return {what: works.strip() for what, works in rows}


def verdict(works: str, test: str, outcomes: Mapping[str, str]) -> str | None:
    """What the outcomes say of a feature.

    Args:
        works: the word for it if all cases of its test pass.
        test: the test.
        outcomes: passed, failed or skipped, by the id of a case.

    Returns:
        ``works``, or that it was not run, or None if none of its cases is known.
    """
    found = {outcome for case, outcome in outcomes.items() if case == test or case.startswith(f"{test}[")}
    return None if not found else works if found == {"passed"} else NOT_RUN


def unshown(page: str, outcomes: Mapping[str, str]) -> list[str]:
    """Features that the page claims, of which the outcomes say otherwise."""
    claims = claims_of(page)
    verdicts = {what: verdict(works, test, outcomes) for what, works, test in FEATURES}
    return [what for what, found in verdicts.items() if found == NOT_RUN and claims.get(what) != NOT_RUN]


def render(outcomes: Mapping[str, str], page: str) -> str:
    """The page as Markdown; what the outcomes say nothing of keeps what the present page says."""
    claims = claims_of(page)
    found = {what: verdict(works, test, outcomes) or claims.get(what, NOT_RUN) for what, works, test in FEATURES}
    rows = "".join(f"| {what} | {found[what]} | `{test}` |\n" for what, _, test in FEATURES)
    return _HEADER + rows + "".join(page.partition(VERSIONS)[1:])
