"""Draw the weight each policy loss puts on a token's gradient, against its ratio: docs/images/gradient_weights.png.

python tools/plot_gradient_weights.py [OUT.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from megatron_klear.config.loss import (
    CeGppoLossConfig,
    CispoLossConfig,
    ClipHigherLossConfig,
    GppoLossConfig,
    PpoLossConfig,
)
from megatron_klear.losses.policy import (
    CeGppoLoss,
    CispoLoss,
    ClipHigherLoss,
    ClippedLoss,
    GppoLoss,
    PpoLoss,
)
from megatron_klear_kernels.linear_policy_loss.coefficients import policy_coefficients

matplotlib.use("Agg")

LOSSES: dict[str, ClippedLoss] = {
    "PPO, GRPO (0.2)": PpoLoss(PpoLossConfig(type="ppo")),
    "clip-higher, DAPO (0.2, 0.28)": ClipHigherLoss(ClipHigherLossConfig(type="clip_higher")),
    "clip-higher + dual clip (c = 2.5)": ClipHigherLoss(ClipHigherLossConfig(type="clip_higher", eps_clip_c=2.5)),
    "CISPO (0.2, 0.28)": CispoLoss(CispoLossConfig(type="cispo")),
    "GPPO (0.2, 0.28)": GppoLoss(GppoLossConfig(type="gppo")),
    "CE-GPPO (0.2, 0.2; 0.75, 1)": CeGppoLoss(CeGppoLossConfig(type="ce_gppo")),
}
DASHES = ("-", "--", ":", "-.", "-", "--")


def main(out: Path) -> None:
    """Two panels, one a sign of the advantage."""
    ratio = torch.linspace(0.0, 3.0, 3001).clamp(min=1e-6)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, sign, title in ((left, 1.0, "advantage > 0"), (right, -1.0, "advantage < 0")):
        for number, (name, loss) in enumerate(LOSSES.items()):
            weight = policy_coefficients(ratio.log(), torch.full_like(ratio, sign), loss.rule).gradient
            # Lines that coincide stay visible: later ones are thinner.
            width = 5.0 - 0.7 * number
            axes.plot(ratio, weight, DASHES[number], linewidth=width, label=name, alpha=0.85)
        axes.set_title(title)
        axes.set_xlabel("ratio = current / old probability")
        axes.grid(alpha=0.3)
    left.set_ylabel("weight on A x grad log pi")
    left.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    print(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images/gradient_weights.png"))
