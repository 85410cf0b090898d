"""Plug-ins for trainers: `transformers`, `lightning`, `accelerate`; each is imported by itself.

    from advisor.integrations.transformers import AdviseCallback

A module here needs its library when it is imported, and says which extra brings it.
"""
