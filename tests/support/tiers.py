"""Which tests show which capability: the fast tier, what ``bash tests/run.sh`` runs.

Each capability is there once, with real ranks; ``tests/unit`` is there whole. Everything else runs with
``bash tests/run.sh --all``. An entry is what pytest takes, below ``tests``: a folder, a file, a test, or one of its
cases.

    python tests/support/tiers.py    # prints them, a line each
"""

from __future__ import annotations

from collections.abc import Iterable

CAPABILITIES: dict[str, tuple[str, ...]] = {
    # The rows of the front page's table, by how they begin.
    "Pipelines of Hugging Face models": (
        "distributed/test_combinations.py::test_every_pair_is_as_it_was_found[each by itself]",
        "distributed/test_pipeline_parity.py::test_pipeline_is_single_process[2-2-1]",
        "distributed/test_pipeline_parity.py::test_loss_is_exact_for_every_kind_of_batch[ragged]",
        "distributed/test_optimizer.py::test_equals_torch[2-2]",
        "distributed/test_initialize.py::test_own_optimizer_and_schedule",
        "distributed/test_precision.py::test_an_overflow_on_one_stage_skips_the_step_on_all",
        "parity/test_families.py::test_family_is_as_listed[llama]",
        "parity/test_families.py::test_family_is_as_listed[gemma2]",
        "parity/test_families.py::test_family_is_as_listed[mixtral]",
    ),
    "Schedules that hide slow transfers": (
        "distributed/test_schedules.py::test_every_schedule_gives_the_weights_of_deepspeed[3-None-options0]",
        "distributed/test_transport.py::test_a_gradient_that_is_sent_is_not_added_to",
    ),
    "A schedule chosen during the run": (
        "distributed/test_controller.py::test_whatever_is_chosen_no_bit_changes",
        "distributed/test_controller.py::test_all_ranks_switch_before_the_same_step",
        "distributed/test_late_gradients.py::test_steps_are_what_their_schedules_say[1-None]",
    ),
    "Interleaved 1F1B": (
        "distributed/test_several_stages_a_rank.py::test_every_bit_is_that_of_one_stage_a_rank[two ranks-interleaved]",
        "distributed/test_several_stages_a_rank.py::test_every_bit_is_that_of_one_stage_a_rank[two ranks-dualpipev]",
    ),
    "Zero-bubble schedules": (
        "distributed/test_split_backward.py::test_families_give_every_bit_of_1f1b[two stages-zbh1]",
        "distributed/test_split_backward.py::test_families_give_every_bit_of_1f1b[two stages-zbv]",
        "distributed/test_split_backward.py::test_gradients_are_reduced_beside_the_last_backward_of_weights[zbh1]",
    ),
    "Compressed boundaries": (
        "distributed/test_boundary_formats.py::test_a_step_is_that_of_one_process_that_rounds[int8-int8]",
        "distributed/test_boundary_formats.py::test_nothing_is_rounded_unless_asked",
    ),
    "No flush at the end of a step": (
        "distributed/test_asynchronous.py::test_follows_the_emulator_in_every_bit[two]",
        "distributed/test_asynchronous.py::test_follows_the_emulator_in_every_bit[one direction]",
        "distributed/test_asynchronous_updates.py::test_late_they_equal_an_emulation[2-1-direction-adam-None]",
        "distributed/test_asynchronous_runs.py::test_resume_is_bitwise[schedule0-bf16]",
    ),
    "Stages sized by device speed": (
        "distributed/test_hetero.py::test_measured_on_the_devices",
        "distributed/test_migration.py::test_any_pipeline_module_trains_as_without[2]",
        "distributed/test_repartition.py::test_layers_leave_a_device_that_slows_down_and_come_back",
    ),
    "Stages that may end between": (
        "distributed/test_half_layers.py::test_no_bit_differs_from_whole_layers[3]",
        "distributed/test_migration.py::test_halves_of_layers_train_as_without[2]",
    ),
    "A head that is more work than a stage": (
        "distributed/test_head_slices.py::test_losses_and_weights_are_those_of_a_whole_head[tied-3]",
    ),
    "Decoder layers through torch.compile": (
        "distributed/test_compiled_layers.py::test_the_call_of_deepspeeds_users_compiles_the_layers",
    ),
    "Stages of several ranks": (
        "distributed/test_tensor_parallel.py::test_losses_and_weights_are_those_of_whole_layers[head]",
        "distributed/test_tensor_parallel.py::test_exports_are_whole",
    ),
    "Replicas of different speed": (
        "distributed/test_unequal_replicas.py::test_any_shares_give_the_numbers_of_one_process[2-shares1-llama-0-0.0]",
        "distributed/test_unequal_replicas.py::test_shares_follow_the_speeds_and_change_no_number[1f1b]",
    ),
    "Recomputation of as few layers": (
        "distributed/test_recompute.py::test_so_many_layers_of_each_stage_are_recomputed[llama]",
        "distributed/test_recompute.py::test_boundaries_and_recomputed_layers_are_found_together[work]",
    ),
    "Expert parallelism with load balancing": (
        "distributed/test_expert_pipelines.py::test_experts_on_several_ranks_change_nothing[1-2-2-cases0]",
        "distributed/test_expert_pipelines.py::test_experts_on_several_ranks_change_nothing[1-3-3-cases4]",
        "distributed/test_expert_engine.py::test_moves_change_nothing[mixtral-1-2-2-1-layer1]",
        "distributed/test_expert_replicas.py::test_copies_train_as_one_expert[mixtral-0-2-2-2-even]",
        "distributed/test_expert_migration.py::test_layers_move_with_their_experts",
        "distributed/test_rebalancer.py::test_hot_experts_are_spread_and_no_number_changes",
    ),
    "Natural gradients": (
        "distributed/test_natural_gradient.py::test_pipelines_are_as_by_hand[2-1]",
        "distributed/test_natural_gradient_plain.py::test_engines_without_a_pipeline_are_as_by_hand",
    ),
    "Limits on how far one update moves": (
        "distributed/test_max_change.py::test_edges_of_pipelines[0-1-fp32]",
        "distributed/test_max_change.py::test_engines_without_a_pipeline",
    ),
    "Local SGD and DiLoCo": (
        "distributed/test_averaging.py::test_a_round_is_the_mean_whatever_the_islands_shapes[shapes0-changes0]",
        "distributed/test_averaging_rules.py::test_a_rule_is_what_it_is_by_hand",
        "distributed/test_islands.py::test_one_is_killed_and_comes_back",
    ),
    "A parallelism plan for a cluster": (
        "distributed/test_plan.py::test_it_starts[llama-tp1_pp2_dp1_ep1]",
        "distributed/test_plan_at_start.py::test_the_losses_are_those_of_any_number_of_stages[False]",
    ),
    "Background checkpoints": (
        "distributed/test_resume.py::test_resume_is_bitwise[fp32]",
        "distributed/test_reshape.py::test_every_shape_into_another[2x1]",
        "distributed/test_job_resume.py::test_interrupted_in_mid_epoch[blocks]",
        "distributed/test_resume.py::test_a_failed_save_stops_all_ranks_at_a_step",
    ),
    "LoRA and other adapters": (
        "distributed/test_adapters.py::test_lora_is_that_of_one_process[2-1]",
        "distributed/test_adapters.py::test_export_is_the_file_that_peft_writes[ia3-changes1]",
        "distributed/test_adapters.py::test_adapters_on_quantised_weights[4]",
    ),
    "A report of each run": ("distributed/test_report.py::test_the_job_writes_a_page_and_says_where",),
    "Fixes for nine faults of DeepSpeed": (
        "patches/test_registry.py",
        "patches/test_pipeline_faults.py::test_the_gradient_norm_is_that_of_all_stages",
    ),
    # Beside them.
    "ways in: command, Trainer, own loop": (
        "distributed/test_main_job.py::test_embedded_default_through_the_launcher",
        "distributed/test_trainer.py::test_a_pipeline_trains_as_one_process_does[2]",
        "distributed/test_trainer.py::test_trl_fine_tunes_with_a_pipeline[False]",
        "distributed/test_weights.py::test_export_loads_as_anybody_loads_it[llama-2-4]",
        "distributed/test_plain_python.py::test_a_loop_of_ones_own",
    ),
    "data": ("distributed/test_main_job_data.py::test_the_same_run_in_every_shape[messages-packed-streamed]",),
    "accidents": (
        "distributed/test_failures.py::test_an_accident_of_one_rank_ends_all_and_is_told_once[is killed-0]",
        "distributed/test_wrong_input.py::test_error_on_one_rank_stops_all",
        "distributed/test_wrong_input.py::test_ends_of_a_pipeline_that_see_different_data_are_told",
        "distributed/test_doctor.py::test_ranks_that_are_well",
    ),
    "parts, alone or with few ranks": ("unit",),
}


def entries() -> list[str]:
    """All of the tier, each once."""
    return list(dict.fromkeys(f"tests/{entry}" for chosen in CAPABILITIES.values() for entry in chosen))


def missing(collected: Iterable[str], asked: Iterable[str]) -> list[str]:
    """Entries that are not among the collected tests, though the files and folders that were asked for are theirs."""
    found = set(collected)
    found |= {node.partition("[")[0] for node in found} | {node.partition("::")[0] for node in found}
    found |= {parent for file in found for parent in _parents(file.partition("::")[0])}
    asked_for = {path.rstrip("/") for path in asked}
    return [
        entry
        for entry in entries()
        if entry not in found and asked_for & {entry.partition("::")[0], *_parents(entry.partition("::")[0])}
    ]


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


if __name__ == "__main__":
    print("\n".join(entries()))
