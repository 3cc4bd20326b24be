"""The nvFuser definitions of the fusions that a plan runs."""

from thunder_flce.planning.plan import layout_for
from thunder_flce.planning.steps import PlannedRegion, backward_stages, forward_stages


def fusion_names(region: PlannedRegion) -> list[str]:
    """The fusions that the region's steps name, in the order of their first use; none on a CPU."""
    stages = (*forward_stages(region), *backward_stages(region))
    return list(dict.fromkeys(name for stage in stages for step in stage.steps for name in step.fusions))


def fusion_definitions(region: PlannedRegion) -> dict[str, str]:
    """The definition of each fusion of a region, as nvFuser prints it, by the name that the steps have for it.

    The gradient of "recompute_logits" is that of a whole slab; what is left for the last one has a definition of its
    own where V is not a multiple of the slab.
    """
    names = fusion_names(region)
    if not names:
        return {}
    from thunder_flce.execution.row_kernels import nvfuser_rows as nvfuser

    problem, loss = region.problem, region.loss
    dtype, out_dtype, logit_map = region.logits_dtype, problem.dtype, loss.logit_map

    layout = layout_for(problem.vocab, dtype=dtype, device_type=problem.device_type)
    tile = layout_for(region.plan.slab_columns or problem.vocab, dtype=dtype, device_type=problem.device_type)
    has_class_weight = region.has_class_weight and loss.label_smoothing != 0
    vectors = nvfuser.GradientVectors(
        row_max=True,
        row_log_sum=True,
        probability=True,
        uniform=True if loss.label_smoothing else None,
        entropy=True if loss.needs_entropy else None,
        class_weight=True if has_class_weight else None,
    )

    def gradient(*, column_sums: bool):
        return nvfuser.gradient_fusion(tile.row_stride, dtype, out_dtype, logit_map, vectors, column_sums=column_sums)

    build = {
        "moments": lambda: nvfuser.moments_fusion(
            layout,
            dtype,
            logit_map,
            expected=loss.needs_entropy,
            weighted_sum=loss.label_smoothing != 0,
            has_class_weight=has_class_weight,
        ),
        "gradient": lambda: gradient(column_sums=False),
        "gradient_with_column_sums": lambda: gradient(column_sums=True),
        "target_gradient": lambda: nvfuser.target_gradient_fusion(
            dtype, out_dtype, logit_map, vectors._replace(one_hot=True)
        ),
    }
    return {name: str(build[name]()).strip() for name in names}
