"""draftloop.cli"""
