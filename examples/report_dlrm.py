"""DLRM with the tables and layers of MLPerf v1, for the fusion report.

python -m fusedcuda report examples/report_dlrm.py:make_model --html dlrm.html
"""

import torch
from torch import Tensor, nn

from fusedcuda.demo.dlrm import CONFIGS, DLRM, NUM_TABLES

BATCH, TABLE_ROWS = 65536, 1_000_000


def make_model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """On the meta device: the report needs shapes, not values, and no memory for the tables."""
    config = CONFIGS["mlperf-v1"]
    with torch.device("meta"):
        dense = torch.empty(BATCH, config.dense_width, dtype=torch.bfloat16)
        indices = torch.empty(BATCH, NUM_TABLES, dtype=torch.int64)
        return DLRM(config, TABLE_ROWS).to(torch.bfloat16), (dense, indices)
