"""Who may use a store, and how connections are protected: tokens, TLS, and the users of this machine."""
