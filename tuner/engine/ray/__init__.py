"""The engine of many machines: the functions of the `local` engine on the nodes of a Ray cluster.

```
tuner process                                                  node (gemm-tuner node)
  RayEngine -> Dispatcher -> Link -- pipe --> bridge -- Ray -->  NodeWorker -> LocalMachine
```

Only `bridge`, `cluster` and `start_node` touch Ray, each in a process of its own: Ray's driver ends its process when it
loses the head, and a tuner must outlive that.
"""
