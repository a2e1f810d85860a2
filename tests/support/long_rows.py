"""Packed rows in segments, and float64 models that read them on several ranks or in one process, for tests of long context."""

import torch

from baton.data_pipeline.packing import Batch
from baton.models import stages
from baton.models.lm import LanguageModel
from baton.parallel.param_layout import initialize_parameters
from support.recurrences import positions, seeded

SEGMENTS, SEGMENT = 3, 12  # 6 tokens to one of two ranks: the longest tail of the small mixers
TOKENS = SEGMENTS * SEGMENT
ROWS = 3


def whole_batch():
    """Packed rows that begin inside a document or at its start; the last one has no document in its last third."""
    g = seeded(11)
    labels = torch.randint(61, (ROWS, TOKENS), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.1] = -1
    labels[:, SEGMENT // 2 - 1 :: SEGMENT // 2] = 7  # a border's last label says that the row goes on
    labels[-1, 2 * SEGMENT :] = -1
    pos = positions(g, ROWS, TOKENS, 0.04).to(torch.int32)
    return Batch(torch.randint(61, (ROWS, TOKENS), generator=g), labels, pos)


def rows_of(batch, rows):
    return Batch(batch.tokens[rows], batch.labels[rows], batch.pos[rows])


def own_spans(batch, mesh, segments):
    """This rank's span of each segment."""
    size = mesh.layout.context
    return [batch.segment(s * size + mesh.context_rank, segments * size) for s in range(segments)]


def joined(parts):
    return Batch(*(torch.cat([getattr(p, name) for p in parts], dim=1) for name in ("tokens", "labels", "pos")))


def model_on(mesh, config, link=None):
    stage = stages.partition_layers(config, mesh.layout.pipeline, TOKENS)[mesh.pipeline_rank]
    place = {"link": mesh.link or link, "stage": stage, "pipeline": mesh.pipeline}
    model = LanguageModel(config, tensor_size=mesh.layout.tensor, compute_dtype=torch.float64, **place)
    initialize_parameters(model, 0, mesh.tensor_rank, mesh.layout.tensor)
    return model.double()


def plain(config, dtype=torch.float64):
    """The whole model on one process, without a link."""
    model = LanguageModel(config, compute_dtype=dtype)
    initialize_parameters(model, 0, 0, 1)
    return model.to(dtype)


class Float64:
    """Within it messages between stages are float64."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)
