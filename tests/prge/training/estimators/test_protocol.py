"""Clipping of projected gradients."""

from __future__ import annotations

import numpy as np

from prge.training.estimators.protocol import clip_by_rms


def test_clipping_keeps_proportions_and_leaves_small_values() -> None:
    projected_gradients = np.array([3.0, -4.0])
    np.testing.assert_allclose(clip_by_rms(projected_gradients, 1.0), projected_gradients / np.sqrt(12.5))
    assert clip_by_rms(projected_gradients, 4.0).tolist() == projected_gradients.tolist()
    assert clip_by_rms(projected_gradients, 0.0).tolist() == projected_gradients.tolist()
    assert clip_by_rms(np.zeros(2), 1.0).tolist() == [0, 0]


def test_every_example_is_clipped_by_itself() -> None:
    projected_gradients = np.array([[3.0, 0.3, 0.0], [-4.0, 0.4, 0.0]])
    result = clip_by_rms(projected_gradients, 1.0)
    np.testing.assert_allclose(result[:, 0], projected_gradients[:, 0] / np.sqrt(12.5))
    assert result[:, 1:].tolist() == projected_gradients[:, 1:].tolist()
