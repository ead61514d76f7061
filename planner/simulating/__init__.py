"""Requests one by one: how long each iteration takes, who waits for whom, and which rate still keeps the limits.

iterations.IterationTime(setting, plan)     the cost engine's iteration times, from tables: `Clock`
rooms.KvRoom.of, rooms.Rules.of             what a replica holds, and how its engine fills iterations
traces.requests, specs.traces.read_trace    requests: arrival, isl, osl
replicas.Replica                            submit jobs in order, advance to a moment
fleets.simulate                             a trace through several replicas -> `Outcome`, arrays by request
queueing                                    the queue alone, for theory
"""
