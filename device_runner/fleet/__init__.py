"""Federated training of one adapter on many devices: agreement, messages, server and device."""
