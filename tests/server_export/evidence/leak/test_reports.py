"""Reports of a device, and the part of the gradient that they contain."""

from __future__ import annotations

import pytest
import torch

from prge.training.estimators.directions import RankOneDirections
from server_export.evidence.leak.reports import ReportView, largest_values, make_report, projections
from tests.server_export.evidence.leak.victims import make_rows, make_victim, text_form


def gradients(count: int = 2, size: int = 600) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


def test_exact_is_the_mean() -> None:
    torch.testing.assert_close(make_report(ReportView(), gradients()).gradient(), gradients().mean(0))


def test_top_has_the_largest_values_at_their_indices() -> None:
    report, mean = make_report(largest_values(gradients(), 0.01), gradients()), gradients().mean(0)
    assert len(report.values) == 6
    assert report.values.abs().min() >= mean.abs().sort().values[-6]
    assert report.view.indices is not None
    torch.testing.assert_close(mean[report.view.indices], report.values)
    assert report.gradient() is None


def test_values_are_projections_on_the_directions_of_a_run() -> None:
    victim, form = make_victim(2), text_form(4)
    own = victim.gradients(form, make_rows(form, 1))[0]
    report = make_report(projections(victim.modules, seed=5, steps=3, queries=2), own)
    direction = RankOneDirections(5, 2, 2, 1, victim.modules)(1)
    assert float(report.values[5]) == pytest.approx(float(own[0] @ torch.from_numpy(direction)), rel=1e-4)


@pytest.mark.parametrize("enough", [True, False])
def test_as_many_projections_as_values_determine_the_gradient(enough: bool) -> None:
    victim, form = make_victim(2, num_hidden_layers=1), text_form(4)
    own = victim.gradients(form, make_rows(form, 1))[0]
    steps = -(-victim.size // 4) + 20 if enough else victim.size // 4 - 1
    result = make_report(projections(victim.modules, 0, steps, 4), own).gradient()
    if not enough:
        assert result is None
        return
    assert result is not None
    assert float((result.float() - own[0]).norm()) < 1e-2 * float(own.norm())


def test_noise_has_its_nominal_size() -> None:
    own = gradients(1, 20_000)
    report = make_report(ReportView(), own, 0.5, torch.Generator().manual_seed(1))
    assert float((report.values - own[0]).std()) == pytest.approx(report.noise, rel=0.05)
    assert report.noise == pytest.approx(0.5 * float(own.norm()))
    assert report.gradient() is None


def test_clipping_bounds_what_a_row_adds_to_a_step() -> None:
    own = gradients(2) * torch.tensor([[1.0], [0.1]])
    directions = torch.randn(40, 600, generator=torch.Generator().manual_seed(2)).sign()
    plain = ReportView(directions=directions, queries=4)
    report = make_report(plain, own, 1.0, torch.Generator().manual_seed(1))
    clip = float(own.norm(dim=1).max())
    steps = report.view(own).reshape(2, 10, 4)
    assert float(steps.norm(dim=2).max()) <= clip * 4**0.5 * 1.0001
    # A contribution below the clip bound is unchanged.
    torch.testing.assert_close(steps[1].flatten(), plain(own)[1])


def test_the_right_guess_is_the_likeliest() -> None:
    own = gradients(1)
    report = make_report(ReportView(), own)
    reports = report.view(torch.cat([own, own * 1.1, -own]))
    assert int(report.log_likelihoods(reports).argmax()) == 0
