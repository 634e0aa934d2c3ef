"""The pages of the service: server-rendered, usable without a network, without a mouse and without a build step.

A page reads what the routes for programs read, through the same services; it adds no state of its own.
"""
