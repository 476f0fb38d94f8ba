"""megatron3d: pre-training of GPT-style decoders on a DP x TP x PP mesh.

Importing the package loads nothing heavy. Read the modules in the order of the data flow:
config, params, grid, mesh, comm, layers, model, schedule, pipeline, grads, optimizer, data, checkpoint, trainer.
"""

__version__ = "0.1.0"
