"""A trainer from another package: softmax regression at a temperature."""
