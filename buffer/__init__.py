"""The stream between actors and learner: types, wire, durable log, ledger, server, clients and the weights channel. Loads neither torch nor ray."""
