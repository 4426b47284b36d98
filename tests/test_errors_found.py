"""Errors that were found in use, and the tests in which each would show again.

Tests are named without their files, which may move.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FOUND: dict[str, tuple[str, ...]] = {
    "a checkpoint for other data loads where the first layer is recurrent, called twice or reads tokens": (
        "test_a_checkpoint_for_other_data_is_refused",
    ),
    "elements read by two views and joined again count as independent": ("test_joins_of_views_are_right_or_marked",),
    "a batch norm that is called twice gives its layers the statistics of both calls mixed": (
        "test_calls_with_statistics_of_their_own_are_refused",
    ),
    "a promise that nothing changes holds on through fused steps, compiled calls and changes between layers": (
        "test_a_step_within_a_promise_is_refused",
        "test_compiled_models_follow_changes_within_a_promise",
        "test_what_changes_between_layers_within_a_promise_is_refused",
        "test_parametrized_weights_within_a_promise",
    ),
    "gradients pass what is detached, and straight-through estimators are walls": (
        "test_no_gradient_passes_what_is_detached",
        "test_a_straight_through_estimator_between_two_layers",
    ),
    "the cells of an unrolled recurrent network have no gradients": ("test_gradients_of_an_unrolled_cell",),
    "a copy of a part keeps layers of its own before it that nobody trains": ("test_a_copy_of_a_head_is_refused",),
    "coverage calls a sum over one value with itself exact": (
        "test_coverage_says_what_propagate_says_of_one_value_read_twice",
    ),
    "kernels and biases that a model draws end in an error without a sentence": (
        "test_layers_with_weights_that_are_drawn",
    ),
    "so does a batch norm whose parameters something else reads": (
        "test_a_batch_norm_that_something_else_reads_stays",
    ),
    "so does a part that is folded in place": ("test_a_part_is_folded_in_a_copy_alone",),
    "so does a layer without weights": ("test_layers_without_weights",),
    "nothing trains after the normalization where only biases did": ("test_frozen_weights_with_trained_biases",),
    "a number that acts on what a parameter was combined with ends in an error": (
        "test_what_is_written_behind_a_parameter",
    ),
    "an activation inside of a class of batch norm is lost": ("test_every_form_computes_the_same",),
    "transformers of Hugging Face cannot be normalized": ("test_models_of_transformers",),
    "a module that is replaced in a copy before its first call is not noticed": (
        "test_a_module_replaced_before_the_first_call_is_refused",
    ),
    "other names of torch's operations have no rule": ("test_aliases_have_the_rules_of_their_operations",),
    "the result of a module that returns several is the last of them": (
        "test_a_module_that_returns_several_has_the_statistics_of_the_first",
    ),
    "quadratures are kept for derivatives that nobody asked for, by the gigabyte": (
        "test_nothing_is_kept_for_autograd_unless_it_is_asked_for",
        "test_memory_is_that_of_no_grad",
    ),
    "one draw of places that a model draws anew counts as the only one": ("test_places_drawn_at_random_are_marked",),
    "a function of what a dropout leaves is computed as one of a Gaussian value, and called exact": (
        "test_functions_of_what_a_dropout_leaves_are_exact",
        "test_what_takes_dropped_values_as_gaussian_says_so",
    ),
    "functions of maxima, products, ranks and norms are called exact": (
        "test_functions_of_what_is_not_gaussian_are_marked",
    ),
    "a model cannot be called once mixed precision is taken off again": (
        "test_accelerate_takes_mixed_precision_off_again",
    ),
    "an input of infinite variance gives a layer of zeros": ("test_moments_that_are_not_finite_are_refused",),
    "layers of one value, added up, count as independent": ("test_branches_that_are_alike_are_warned_of",),
    "what is asked under autocast is computed in half precision, and fold ends in an error": (
        "test_what_is_asked_under_autocast_is_what_it_is_without",
    ),
    "weights that the model computes are taken for those of the layer they are given to": (
        "test_a_layer_with_computed_parameters_stays_plain",
        "test_a_batch_norm_with_computed_parameters_stays",
        "test_other_forms_leave_such_a_layer_alone",
    ),
    "a scale and a shift written as addcmul are integrated: a normalized ResMLP takes 15 times as long": (
        "test_lines_are_not_integrated",
    ),
    "preserving a network whose shared layers settle nowhere takes 300 sweeps, and another layer is named": (
        "test_a_layer_on_its_own_output_that_settles_nowhere_is_refused_soon_with_advice_that_works",
    ),
    "weight normalization of a copy breaks a layer whose bias is parametrized": (
        "test_other_forms_leave_such_a_layer_alone",
    ),
    "a network of which a part is of another dtype cannot be called, and other biases change their dtype": (
        "test_a_part_in_another_dtype",
        "test_parameters_of_a_layer_in_different_dtypes_are_refused",
    ),
    "a network in another dtype than it was normalized in, or in 16 bits, fails where plain layers stay between": (
        "test_plain_layers_between_normalized_ones_in_another_dtype",
    ),
    "in inference mode a parametrized layer cannot be called, nor any model folded or copied": (
        "test_weights_made_in_inference_mode",
    ),
    "normalize says that load_state_dict refuses untied weights, where it ties them again without a word": (
        "test_biases_and_untied_weights_are_told_at_once",
        "test_untied_weights_are_tied_again_by_a_plain_class_that_loads_them",
    ),
    "a model that keeps tensors of its last call in a list or dict ends in torch's own error, and so does fold": (
        "test_what_an_earlier_call_has_left_is_named",
    ),
    "fold leaves dead parameters of a parametrization that a recurrent layer got after normalize": (
        "test_a_recurrent_layer_that_is_parametrized_later",
    ),
    "normalize gives a wrong reason, or none, for leaving out what the example does not reach": (
        "test_what_the_example_does_not_reach_is_named",
    ),
    "batch norms that train behind frozen weights do not train once they are absorbed": (
        "test_batch_norms_that_train_behind_frozen_weights",
    ),
    "normalize of a parametrized layer before a batch norm ends in an error without a sentence": (
        "test_a_batch_norm_behind_a_parametrized_weight_stays",
    ),
    "fold and init_ take parametrizations away without a word": (
        "test_parametrizations",
        "test_init_says_that_it_takes_parametrizations_away",
    ),
    "alpha dropout has no variance in evaluation mode, and feature alpha dropout of vectors ends in an error": (
        "test_noise_is_that_of_draws",
        "test_draws_agree_with_the_analytic_result",
    ),
    "a model that calls a traced module ends in an error, and one that calls a scripted one in a riddle": (
        "test_a_scripted_module_is_refused_where_it_is_called_and_a_traced_one_stays",
    ),
    "pages name programs by paths that do not run, and commands that have moved": (
        "test_programs_exist_and_take_the_arguments_they_are_given",
    ),
    "a network of layers that are called often takes many times as long, without a word": (
        "test_what_takes_long_is_said_with_the_reason",
    ),
    "predict gives no variance to what the mean over the batch is taken from: derivatives cancel over the samples": (
        "test_samples_that_meet_are_refused",
    ),
    "predict passes over the variance of a tied parameter under the name that named_parameters gives it": (
        "test_a_tied_parameter_is_random_by_each_of_its_names",
    ),
    "predict passes over a parameter that is read twice, or behind a product or a sum with numbers": (
        "test_random_parameters_beside_what_is_fixed",
        "test_random_parameters_that_are_read_otherwise_are_refused",
    ),
    "threads that predict by one model leave it in other modes": ("test_threads_may_predict_by_one_model",),
    "predict takes maxima, ranks and norms over whole axes as lines, and calls the result reliable": (
        "test_ranks_and_norms_over_whole_axes",
        "test_the_place_of_the_largest_is_doubtful",
        "test_the_largest_of_a_whole_image_that_drops_out_is_doubtful",
    ),
    "predict of a mask taken from a random input ends in an error of torch": (
        "test_masks_that_the_model_takes_from_a_random_input",
    ),
    "data with NaN make the inspector call units dead": ("test_data_that_are_not_finite_are_refused",),
    "snapshots that are one state dict have no variance": ("test_bad_input_gets_one_sentence",),
    "a compiled step of a layer called often ends in an error about alignment on a GPU": (
        "test_results_of_compiled_folds_begin_their_memory",
    ),
}


@pytest.fixture(scope="module")
def names() -> set[str]:
    return {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }


@pytest.mark.parametrize("error", FOUND)
def test_every_error_that_was_found_has_its_tests(error: str, names: set[str]) -> None:
    assert names.issuperset(FOUND[error])
