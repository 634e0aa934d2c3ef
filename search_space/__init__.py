"""Which configs are worth asking about, and in which order.

`request` says what a person asks for, `space` what a search may choose from, `checks` why a choice is turned away
before it costs a compile, `model` how long a config should take, `starting` what is tried first. Arithmetic only: no
Optuna, no GPU, no TVM.
"""
