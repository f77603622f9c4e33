"""Clipping of projected gradients."""

from __future__ import annotations

import numpy as np

from prge.training.estimators.protocol import clip_by_rms


def test_clipping_keeps_proportions_and_leaves_small_values() -> None:
    scalars = np.array([3.0, -4.0])
    np.testing.assert_allclose(clip_by_rms(scalars, 1.0), scalars / np.sqrt(12.5))
    assert clip_by_rms(scalars, 4.0).tolist() == scalars.tolist()
    assert clip_by_rms(scalars, 0.0).tolist() == scalars.tolist()
    assert clip_by_rms(np.zeros(2), 1.0).tolist() == [0, 0]


def test_every_example_is_clipped_by_itself() -> None:
    scalars = np.array([[3.0, 0.3, 0.0], [-4.0, 0.4, 0.0]])
    found = clip_by_rms(scalars, 1.0)
    np.testing.assert_allclose(found[:, 0], scalars[:, 0] / np.sqrt(12.5))
    assert found[:, 1:].tolist() == scalars[:, 1:].tolist()
